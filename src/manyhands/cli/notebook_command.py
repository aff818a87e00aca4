"""``manyhands notebook``: write a notebook with which others join a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.base.errors import ConfigError
from manyhands.base.run_id import checked_run_id
from manyhands.base.ticket import split_tickets
from manyhands.cli.options import what_cannot_be_installed
from manyhands.version import __version__

TEMPLATE = Path(__file__).parent / "notebooks" / "join.ipynb"
"""A copy of ``examples/notebooks/join.ipynb``."""
DATA = "data"
"""The extra with all packages that a trainer needs for data at any address except S3."""
S3 = "s3"
"""The extra with all packages that a trainer needs for data in S3."""
CURVES = "ask for the link."
"""Text of the template that is replaced by a link to the curves."""


def notebook(
    *,
    run_id: Annotated[str, Parameter(help="Name of the run.")],
    initial_peers: Annotated[
        tuple[str, ...], Parameter(help="Multiaddrs or HOST:PORT of peers of the run, or a ticket; several are safer.")
    ],
    dataset_url: Annotated[
        tuple[str, ...], Parameter(help="Addresses of an index.json of shards, or of an archive; several are mirrors.")
    ] = (),
    curves_url: Annotated[str | None, Parameter(help="Page with the curves of the run, to link to.")] = None,
    install: Annotated[
        str | None,
        Parameter(
            help="What pip installs: a package with its extra, a wheel, or git+https://...; by default this version on "
            "PyPI."
        ),
    ] = None,
) -> None:
    """Write a notebook for Colab or Kaggle, with which volunteers join a run by running all cells.

    It goes to standard output. For example:

        manyhands notebook --run-id my-albert --initial-peers 203.0.113.7:31337 > join.ipynb
    """
    checked_run_id(run_id)
    addresses, _ = split_tickets(initial_peers)
    if not initial_peers:
        raise ConfigError("volunteers need an address: --initial-peers HOST:PORT, that of the monitor for example")
    for url in (*dataset_url, *([curves_url] if curves_url is not None else [])):
        if not re.fullmatch(r"(https?|ftp|s3)://[^\s<>()\"']+", url):
            raise ConfigError(
                f"{url!r} is not an address that volunteers can open; for example https://example.org/data"
            )
    if install is None:
        extra = S3 if any(url.startswith("s3:") for url in dataset_url) else DATA
        install = f"manyhands[{extra}]=={__version__}"
        if note := what_cannot_be_installed("volunteers", "--install", f"manyhands[{extra}] @ "):
            _warn(f"{note}. Now the notebook installs {install} from PyPI")
    if not any(address.is_public for address in addresses):
        hosts = ", ".join(address.host for address in addresses)
        _warn(f"{hosts} is not a public address: machines outside of your network cannot join there")
    fields = {
        "INITIAL_PEERS": " ".join(initial_peers),
        "RUN_ID": run_id,
        "DATASET_URL": " ".join(dataset_url),
        "REQUIREMENT": install,
    }
    sys.stdout.write(filled(TEMPLATE.read_text(encoding="utf-8"), fields, curves_url))


def _warn(message: str) -> None:
    print(f"manyhands: {message}", file=sys.stderr)  # noqa: T201 (standard output is the notebook)


def filled(template: str, fields: Mapping[str, str], curves_url: str | None = None) -> str:
    """Return the text of a notebook in which the fields of a template have other values.

    Args:
        template: the text of the notebook, with one line ``NAME = "..."`` for each field.
        fields: name -> value.
        curves_url: in place of the advice to ask for it.
    """
    notebook = json.loads(template)
    left = dict(fields)
    for cell in notebook["cells"]:
        cell["source"] = [_filled_line(line, left) for line in cell["source"]]
        if curves_url is not None:
            cell["source"] = [line.replace(CURVES, f"[here they are]({curves_url}).") for line in cell["source"]]
    assert not left, f"the template has no field for {', '.join(left)}"
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _filled_line(line: str, left: dict[str, str]) -> str:
    name, separator, rest = line.partition(' = "')
    if not separator or name not in left:
        return line
    _, _, comment = rest.partition('"')
    return f"{name} = {json.dumps(left.pop(name))}{comment}"
