"""The report of a deadlock: every live warp, what it waits for, and who could release it."""

from fa4build.simulate.hardware.gang import place


def deadlock_report(kernel: str, clusters: list) -> str:
    """Text of the report: a line a gang, then the cycle of the wait-for graph if there is one."""
    lines = [f"{kernel}: deadlock: no warp can go on and no asynchronous operation is pending"]
    for cluster in clusters:
        for cta in cluster.ctas:
            lines += [f"  {_gang_line(gang)}" for gang in cta.gangs]
            lines += [f"  {line}" for line in _exited_lines(cta)]
        cycle = _cycle(cluster)
        if cycle:
            lines.append("  cycle: " + " -> ".join(place(gang) for gang in [*cycle, cycle[0]]))
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


def _cycle(cluster) -> list:
    """Gangs that wait for each other in a ring; an edge leads to whoever released such a wait before."""
    gang_of = {(cta.rank, w.index): g for cta in cluster.ctas for g in cta.gangs for w in g.warps}
    edges: dict = {}
    for gang in dict.fromkeys(gang_of.values()):
        targets = dict.fromkeys(gang_of[key] for key in sorted(gang.wait.blockers()) if key in gang_of)
        edges[gang] = [t for t in targets if t is not gang]
    path: list = []
    done: set = set()
    for start in edges:
        found = _walk(start, edges, path, done)
        if found:
            return found
    return []


def _walk(gang, edges: dict, path: list, done: set) -> list:
    if gang in path:
        return path[path.index(gang) :]
    if gang in done:
        return []
    path.append(gang)
    for other in edges[gang]:
        found = _walk(other, edges, path, done)
        if found:
            return found
    path.pop()
    done.add(gang)
    return []
