"""Findings of the checks: errors and notes, each said once per pair of places."""

from fa4build.errors import SimulationError

LIMIT = 40  # findings listed in one message


class Findings:
    """Collects; `raise_if_any` turns errors into one exception. Errors of `allowed` rules are only noted."""

    def __init__(self, kernel: str, instructions, allowed: tuple[str, ...] = ()):
        self.kernel, self.instructions, self.allowed = kernel, instructions, allowed
        self.errors: list[str] = []
        self.notes: list[str] = []
        self._seen: set = set()

    def line(self, site: int) -> str:
        """`line 120 `st.shared...``."""
        ins = self.instructions[site]
        return f"line {ins.line} `{ins.text[:90]}`"

    def error(self, rule: str, key: tuple, text: str) -> None:
        """Adds an error unless the same was found before."""
        if (rule, key) not in self._seen:
            self._seen.add((rule, key))
            (self.notes if rule in self.allowed else self.errors).append(f"{rule} {text}")

    def note(self, key: object, text: str) -> None:
        """Adds a note unless the same was found before."""
        if key not in self._seen:
            self._seen.add(key)
            self.notes.append(text)

    def raise_if_any(self) -> None:
        """Raises: SimulationError: with every error found."""
        if self.errors:
            more = f"\n  ... and {len(self.errors) - LIMIT} more" if len(self.errors) > LIMIT else ""
            listed = "\n  ".join(self.errors[:LIMIT])
            raise SimulationError(f"{self.kernel}: {len(self.errors)} hazards:\n  {listed}{more}")


def place(findings: Findings, g, site: int) -> str:
    """`CTA rank 0 warps 4-7, line 120 `st.shared...``."""
    warps = [w.index for w in g.warps]
    span = f"warp {warps[0]}" if len(warps) == 1 else f"warps {warps[0]}-{warps[-1]}"
    return f"CTA rank {g.cta.rank} {span}, {findings.line(site)}"
