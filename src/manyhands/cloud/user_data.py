"""The script with which a fresh Ubuntu machine installs manyhands and joins a run. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.version import __version__

TRAIN_EXTRAS = "s3,tensorboard,web"
"""All that options of ``manyhands train`` import: a trainer that lacks a package fails for ever, and costs money."""

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
BURST_S = 0.01
MIN_BURST_BYTES = 65_536
"""The kernel hands packets of up to 64 KiB to the network card, which splits them."""


@dataclass(frozen=True)
class Program:
    """A command of manyhands on a machine of its own.

    Attributes:
        arguments: of the command, without addresses.
        port: where it accepts connections; None if it only dials out.
        source: address of the package, in place of this version on PyPI.
        upload_mbit_s: speed that the uplink is shaped to; None for no limit.
    """

    arguments: tuple[str, ...]
    port: int | None
    source: str | None = None
    upload_mbit_s: float | None = None
    needs_torch: bool = True
    has_gpu: bool = True

    @property
    def requirement(self) -> str:
        """What pip installs."""
        package = f"manyhands[{TRAIN_EXTRAS}]" if self.needs_torch else "manyhands"
        return f"{package}=={__version__}" if self.source is None else f"{package} @ {self.source}"

    def command(self, initial_peers: Sequence[str]) -> str:
        """The command line, in which the shell fills in ``$ANNOUNCE``."""
        words = ["manyhands", *self.arguments]
        if initial_peers:
            words += ["--initial-peers", *initial_peers]
        line = shlex.join(words)
        return line if self.port is None else f"{line} --listen {self.port} --announce $ANNOUNCE"


def user_data(program: Program, initial_peers: Sequence[str]) -> str:
    """The script, for cloud-init. It has no secrets: everybody on the machine can read it.

    The peer runs as a systemd service, which starts it again after a failure and after a reboot. All that it logs goes
    to the console of the machine too, where AWS shows it.
    """
    return SCRIPT.format(
        install_torch=f"retry bin/pip install -q torch --index-url {CPU_TORCH}\n"
        if program.needs_torch and not program.has_gpu
        else "",
        requirement=shlex.quote(program.requirement),
        shaping="true" if program.upload_mbit_s is None else shaping(program.upload_mbit_s),
        find_addresses="" if program.port is None else FIND_ADDRESSES.format(port=program.port),
        command=program.command(initial_peers),
    )


def shaping(mbit_s: float) -> str:
    """The line that limits what a machine sends, on the interface of its default route."""
    burst = max(MIN_BURST_BYTES, int(mbit_s * 1e6 / 8 * BURST_S))
    return (
        "tc qdisc replace dev \"$(ip -4 route show default | awk '{print $5; exit}')\" root "
        f"tbf rate {int(mbit_s * 1000)}kbit burst {burst} latency 400ms"
    )


FIND_ADDRESSES = """\
token=$(curl -sf --retry 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token)
ask() {{ curl -sf --retry 5 -H "X-aws-ec2-metadata-token: $token" "http://169.254.169.254/latest/meta-data/$1"; }}
public=$(ask public-ipv4 || true)
ANNOUNCE="${{public:+/ip4/$public/tcp/{port} }}/ip4/$(ask local-ipv4)/tcp/{port}"
"""
"""Both are announced: traffic within a zone is free by the private address, and costs by the public one."""

SCRIPT = """\
#!/bin/bash
set -euo pipefail
trap '[ $? = 0 ] || echo "manyhands: setting this machine up failed; see the lines above"' EXIT
export DEBIAN_FRONTEND=noninteractive HOME=/root
retry() {{ for pause_s in 5 15 30 60; do "$@" && return; sleep $pause_s; done; "$@"; }}

echo "manyhands: installing"
retry apt-get -q -o DPkg::Lock::Timeout=300 update
retry apt-get -q -o DPkg::Lock::Timeout=300 install -y python3-venv git curl iproute2
useradd --system --create-home --home-dir /var/lib/manyhands manyhands
python3 -m venv /opt/manyhands
cd /opt/manyhands
{install_torch}retry bin/pip install -q {requirement}

cat >bin/take-part <<'END-OF-SCRIPT'
#!/bin/bash
set -eu
export PATH=/opt/manyhands/bin:$PATH
{find_addresses}exec {command}
END-OF-SCRIPT
cat >bin/shape <<'END-OF-SCRIPT'
#!/bin/bash
{shaping}
END-OF-SCRIPT
chmod 755 bin/take-part bin/shape

cat >/etc/systemd/system/manyhands.service <<'END-OF-UNIT'
[Unit]
Description=manyhands
Wants=network-online.target
After=network-online.target

[Service]
User=manyhands
WorkingDirectory=/var/lib/manyhands
ExecStartPre=+/opt/manyhands/bin/shape
ExecStart=/opt/manyhands/bin/take-part
Restart=on-failure
RestartSec=15
LimitNOFILE=65536
StandardOutput=journal+console
StandardError=journal+console

[Install]
WantedBy=multi-user.target
END-OF-UNIT
systemctl daemon-reload
systemctl enable --now manyhands
echo "manyhands: the peer is started"
"""
