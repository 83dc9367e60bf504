"""One self-contained HTML page about everything that was built and proven, from cache, packs, evidence and benchmarks.

Three steps: `collect` reads everything into values, `plots` draws them (matplotlib, the optional extra `report`), and
`page` writes the page. The same inputs give the same bytes: no time, no path, no machine is in it.
"""
