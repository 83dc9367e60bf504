"""The report of a deadlock: every live warp, what it waits for, and who could release it."""

from fa4build.simulate.scheduler import place


def deadlock_report(kernel: str, clusters: list) -> str:
    """Text of the report; one line a gang."""
    lines = [f"{kernel}: deadlock: no warp can go on and no asynchronous operation is pending"]
    for cluster in clusters:
        for cta in cluster.ctas:
            lines += [f"  {_gang_line(gang)}" for gang in cta.gangs]
            lines += [f"  {line}" for line in _exited_lines(cta)]
    return "\n".join(lines)


def _gang_line(gang) -> str:
    node = gang.program.nodes[gang.pc]
    ins = gang.program.function.instructions[node.start]
    lanes = "" if gang.mask is None else f", {gang.active} of {gang.lanes} lanes"
    return f"{place(gang)}{lanes}, PTX line {ins.line} `{ins.text[:120]}` waits for {gang.wait.describe()}"


def _exited_lines(cta) -> list[str]:
    alive = {w.index for g in cta.gangs for w in g.warps}
    gone = [w.index for w in cta.warps if w.index not in alive]
    return [f"CTA {cta.ctaid}: warps {gone} have exited"] if gone and alive else []
