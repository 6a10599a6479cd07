"""`autopar serve`: an HTTP server with OpenAI's API for a model of transformers, on local ranks or under torchrun.

    autopar serve Llama-3-8B --mesh tp=2 --port 8000 --max-length 8192 --cache 20GB
    autopar serve Mixtral-8x7B --attention dp=2,tp=2 --experts ep=4      experts on ranks of their own

Checks everything that it can before torch is loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.shared_arguments import dtype_of, mesh, positive
from autopar.values import byte_count

# What `pip install 'autopar[serve]'` installs: module -> name of its project.
NEEDED = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "openai": "openai",
    "prometheus_client": "prometheus-client",
    "llguidance": "llguidance",
    "transformers": "transformers",
}
_MOST_PORT = 65535


def _folder(text: str) -> Path:
    path = Path(text)
    try:
        there = (path / "config.json").is_file()
    except (OSError, ValueError):  # an invalid file name, or a loop of symbolic links
        there = False
    if not there:
        raise argparse.ArgumentTypeError(
            f"no config.json in a folder {text!r}; give the folder of a transformers model, such as `hf download` fills"
        )
    return path


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_PORT:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to {_MOST_PORT}, 0 for a free one, found {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    try:
        return byte_count("cache", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("cache: ")) from None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=_folder, metavar="FOLDER", help="a model of transformers: config, weights, tokenizer")
    add("--mesh", type=mesh, default="tp=1", metavar="tp=2", help="axes and sizes (default: %(default)s)")
    add("--attention", type=mesh, metavar="dp=2", help="ranks of attention alone, in place of --mesh")
    add("--experts", type=mesh, metavar="ep=4", help="ranks of experts alone, with --attention")
    add("--apart", choices=("experts", "mlp"), help="what these have: experts (default), or MLPs of a dense model")
    add("--microbatches", type=positive, metavar="N", help="that take turns between the two (default: 3)")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0 for a free one (default: %(default)s)")
    add("--name", help="of the model in requests (default: the folder's)")
    add(
        "--max-length",
        type=positive,
        default=4096,
        metavar="N",
        help="most tokens of a request, prompt included (default: %(default)s)",
    )
    add(
        "--cache",
        type=_bytes,
        metavar="BYTES",
        help="keys and values of a rank, such as 8GB (default: 0.9 of the free memory of a GPU, 8 requests on CPUs)",
    )
    add("--max-running", type=positive, default=64, metavar="N", help="requests that run (default: %(default)s)")
    add("--max-waiting", type=positive, default=1024, metavar="N", help="requests that may wait (default: %(default)s)")
    add("--dtype", type=dtype_of, help="of weights: bf16, fp16, fp32, fp64 (default: the config's)")
    add("--device", choices=("cpu", "cuda"), help="of the ranks (default: cuda if there is one)")


def _run(args: argparse.Namespace) -> int:
    if (args.attention is None) != (args.experts is None):
        raise ValueError("serve: needs both --attention and --experts, or neither; give the other one, too")
    of_roles = [name for name in ("microbatches", "apart") if getattr(args, name) is not None]
    if of_roles and not args.experts:
        raise ValueError(f"serve: --{of_roles[0]} is of ranks of experts; give --attention and --experts, too")
    if missing := [project for module, project in NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise ValueError(
            f"serve: needs the extra autopar[serve], found no {', '.join(missing)}; pip install 'autopar[serve]'"
        )
    from autopar.integrations.http.serve import Settings, serve_folder  # loads torch, transformers and the extra

    given = {name: getattr(args, name) for name in Settings.__dataclass_fields__}
    return serve_folder(Settings(**given))


SERVE = Command("serve", "serve a model over HTTP with OpenAI's API", _add_arguments, _run)
