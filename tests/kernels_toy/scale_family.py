from fa4build.families import FamilyKernel, Input, kernel_family, one_step

X = Input(name="x", dtype="bf16", shape=("rows", 256))
SCALE = Input(name="scale", dtype="f32", shape=("rows",))
OUT = Input(name="out", dtype="bf16", shape=("rows", 256))


def compile_kernel(request, options):
    from fa4build.families.tracing import compile_host
    from tests.kernels_toy.scale_rows import ScaleRows

    return compile_host(ScaleRows(), [X, SCALE, OUT], request, options)


def kernels(arch):
    name = f"scale_rows-{arch}-bf16-n256"
    yield FamilyKernel(id=name, op="scale_rows", arch=arch, function=f"{__name__}:compile_kernel")


FAMILY = kernel_family(
    name="toy",
    summary="Rows scaled by a factor each",
    kernels=kernels,
    op_recipes=lambda built: tuple(one_step(kernel, [X, SCALE, OUT], results=["out"]) for kernel in built),
)
