"""`fa4build key`: keys that sign packs and bundles."""

from pathlib import Path

import click

from fa4build.cli.common import json_option, note, print_json


@click.group("key")
def command() -> None:
    """Make and show the keys that sign packs and bundles."""


@command.command("new")
@click.option("--name", default="release", show_default=True, help="The files are called NAME.key and NAME.pub.")
@click.option(
    "--out",
    "out_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The directory for the files. Default: the current one.",
)
@json_option
def new(name: str, out_dir: Path, as_json: bool) -> None:
    """Make a key. NAME.key signs and stays secret; NAME.pub is for the machines that install.

    \b
    Examples:
      fa4build key new --name release
      fa4build wheel --arch sm90 --sign release.key
    """
    from fa4build.shipping.signing import new_key

    private_path, public_path, key = new_key(out_dir, name)
    if as_json:
        print_json({"private": str(private_path), "public": str(public_path), "key_id": key.key_id})
        return
    click.echo(f"key {key.key_id}\n  {private_path}  signs; keep it secret\n  {public_path}  for trust stores")
    note("Operators put the .pub file into their trust store. From then on, a key in the store must sign packs.")


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def show(file: Path, as_json: bool) -> None:
    """Print the id and the public part of a key file, private or public.

    \b
    Example:
      fa4build key show release.key
    """
    from fa4build.shipping.signing import read_public_key

    key_id, pem = read_public_key(file)
    if as_json:
        print_json({"key_id": key_id, "public": pem})
        return
    click.echo(f"key {key_id}\n{pem}", nl=False)
