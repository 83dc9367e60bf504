"""`python -m fa4_kernels serves CONFIG`: does this install answer every layer of a model? Needs no GPU and no torch."""

import argparse
import sys
from collections.abc import Sequence

from ..errors import InputError
from ..packs import Pack, RefusedPack, refused
from .gpus import Gpu, gpu_named
from .layers import Model
from .needs import SERVING, TRAINING, Use, checked_use, use_as_options
from .reading import read_model
from .serving import Answer, PartAnswers, answers_of, missing_ids

_ANY_PAGES = 16  # kernels take pages of any size: one is asked about where none is named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `serves`; they have the names that the builder's commands have."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="a config.json, or its directory")
    parser.add_argument(
        "--gpu", action="append", metavar="GPU", help="H200, B200, sm90, ...; default: the GPUs of the installed packs"
    )
    parser.add_argument("--for", dest="purpose", choices=(SERVING, TRAINING), help="default: both")
    parser.add_argument(
        "--page-size", type=int, help="only serving with a paged KV cache; default: both with pages and without"
    )
    parser.add_argument("--cache-dtype", help="dtype of the KV cache; default: the model's")
    parser.add_argument(
        "--query-rows",
        type=int,
        default=1,
        help="query tokens of a decoding step; more than 1 with speculative decoding",
    )
    parser.add_argument("--deterministic", action="store_true", help="gradients with the same bits in every run")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the heads")


def run(options: argparse.Namespace, packs: Sequence[Pack | RefusedPack]) -> int:
    """Print the answers. Status 0: every use that was asked about is complete; 1: not; 2: a wrong argument."""
    try:
        models = [read_model(config) for config in options.configs]
        gpus = [gpu_named(name) for name in options.gpu] if options.gpu else _gpus_of(packs)
        uses = [checked_use(use) for use in _uses(options)]
        is_complete = [_tell(models, gpu, use, packs, options.configs) for gpu in gpus for use in uses]
    except InputError as error:
        print(f"fa4_kernels: {error}", file=sys.stderr)
        return 2
    for pack in refused(packs):
        print(f"pack {pack.name} is not used: {pack.reason}")
    return 0 if all(is_complete) else 1


def _gpus_of(packs: Sequence[Pack | RefusedPack]) -> list[Gpu]:
    targets = {target: None for pack in packs if isinstance(pack, Pack) for target in pack.manifest.targets}
    if not targets:
        raise InputError("no pack is installed. Give the GPU to see what is missing: --gpu H200")
    return [gpu_named(target) for target in targets]


def _uses(options: argparse.Namespace) -> list[Use]:
    serving = {"cache_dtype": options.cache_dtype, "query_rows": options.query_rows}
    ranks = {"tensor_parallel": options.tp}
    pages = [options.page_size] if options.page_size is not None else [None, _ANY_PAGES]
    uses = [Use(purpose=SERVING, page_size=size, **serving, **ranks) for size in pages]
    uses += [Use(purpose=TRAINING, deterministic=options.deterministic, **ranks)]
    return [use for use in uses if options.purpose in (None, use.purpose)]


def _tell(
    models: Sequence[Model], gpu: Gpu, use: Use, packs: Sequence[Pack | RefusedPack], configs: Sequence[str]
) -> bool:
    """Print one use on one GPU; whether every layer is answered."""
    parts = answers_of(models, gpu, use, packs)
    is_complete = all(part.is_complete for part in parts)
    print(f"{gpu.name} ({gpu.target}), {use}: {'complete' if is_complete else 'NOT complete'}")
    for part in parts:
        _tell_part(part)
    missing = missing_ids(parts, gpu)
    if missing:
        named = " ".join(f"--model {config}" for config in configs)
        print(f"  missing: {', '.join(missing)}")
        print(f"  build them: fa4build wheel {named} --gpu {gpu.name} {use_as_options(use)}".rstrip())
    return is_complete


def _tell_part(part: PartAnswers) -> None:
    label = part.part.part.label
    where = part.model.name if label == part.model.model_type else f"{part.model.name}, {label}"
    count = sum(part.part.part.kinds().values())
    print(f"  {where}: {count} layers with attention")
    for answer in part.answers:
        print(f"    {answer.need.layers:3} {answer.need.why}: {answer.kernel or _missing(answer)}")
    for lack in part.part.lacks:
        print(f"    {lack.layers:3} no kernel can be asked for: {lack.reason}")
    for note in part.part.notes:
        print(f"    note: {note}")


def _missing(answer: Answer) -> str:
    return f"no kernel for {answer.need.problem}"
