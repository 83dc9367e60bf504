"""Small PTX bodies under all checks of the native engine: what is told of them."""

from fa4build.errors import SimulationError
from fa4build.simulate.native.run import run_launch
from tests.simulate.ptx_snippets import run_report

LANE = "mov.u32 %r60, %laneid;"
SHARED = "mov.b32 %r5, smem; add.s32 %r6, %r5, 256;"
ONE_LANE = "setp.ne.u32 %p1, %r60, {lane};"


def told(body: str, **options) -> str:
    """The error of a run, "" for none."""
    try:
        run_report(body, engine=run_launch, checks=True, **options)
    except SimulationError as error:
        return str(error)
    return ""


def wait(parity: int = 0, barrier: str = "%r5", how: str = "") -> str:
    """Waits at an mbarrier for the end of a phase."""
    text = f"mbarrier.try_wait.parity{how}.shared.b64 P, [{barrier}], {parity}, 10000000;"
    return f"{{ .reg .pred P; W: {text} @P bra.uni D; bra.uni W; D: }}"


def template(text: str) -> str:
    """For `str.format`: braces of PTX stay."""
    return text.replace("{", "{{").replace("}", "}}")


def made(count: int, barrier: str = "%r5", fence: str = "fence.mbarrier_init.release.cluster;") -> str:
    """Thread 0 makes a barrier and publishes it; the block meets."""
    init = f"mov.b32 %r50, {count}; mbarrier.init.shared.b64 [{barrier}], %r50; {fence}"
    return f"setp.ne.s32 %p9, %r0, 0; @%p9 bra MADE; {init} MADE: bar.sync 0;"
