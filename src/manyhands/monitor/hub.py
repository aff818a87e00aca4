"""Uploads the newest checkpoint to the Hugging Face Hub at intervals.

Each upload runs in a child process: a hanging one can be killed, and none outlives the monitor.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.text import reason_of

logger = logging.getLogger(__name__)

SITE = "https://huggingface.co"
MAX_UPLOAD_S = 3600.0
CLOSE_TIMEOUT_S = 2.0
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def checked_repo(name_or_url: str) -> str:
    """The id of a repository of the Hub, after checking that there is a token.

    Args:
        name_or_url: ``NAME``, ``OWNER/NAME``, or the address of its page.
    Raises:
        MissingExtra: the package of the Hub is not installed.
        ConfigError: it is not the name of a repository, or there is no token.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtra("--repo-url", "albert")
    import huggingface_hub

    repo = name_or_url.strip().rstrip("/").removesuffix(".git")
    for site in (os.environ.get("HF_ENDPOINT", SITE), SITE):
        repo = repo.removeprefix(f"{site.rstrip('/')}/")
    if not _REPO.fullmatch(repo):
        raise ConfigError(
            f"--repo-url {name_or_url} names no repository of the Hugging Face Hub; for example OWNER/my-albert"
        )
    if not huggingface_hub.get_token():
        raise ConfigError(
            "--repo-url needs a token of the Hugging Face Hub that may write, and there is none here; run: "
            "hf auth login (or set HF_TOKEN)"
        )
    return repo


class HubUploads:
    """Uploads the last checkpoint given to :meth:`offer`: the first at once, later ones every ``interval_s`` seconds.

    A failed upload is logged and tried again at the next interval.
    """

    def __init__(self, repo: str, interval_s: float) -> None:
        self._repo = repo
        self._interval_s = interval_s
        self._offered: tuple[Path, str] | None = None
        self._sent: tuple[Path, str] | None = None
        self._news = threading.Condition()
        self._is_closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="uploading", daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Path, message: str) -> None:
        """Set the newest checkpoint and its commit message."""
        with self._news:
            self._offered = (checkpoint, message)
            self._news.notify()

    def close(self) -> None:
        """Abort an upload in progress: the Hub then has all of it or nothing."""
        with self._news:
            self._is_closing = True
            if self._process is not None:
                self._process.kill()
            self._news.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due_at = 0.0
        while True:
            with self._news:
                while not self._is_closing and (self._offered == self._sent or time.monotonic() < due_at):
                    self._news.wait(max(due_at - time.monotonic(), 0.1) if self._offered != self._sent else None)
                if self._is_closing or self._offered is None:
                    return
                offered = self._offered
            due_at = time.monotonic() + self._interval_s
            try:
                url = self._upload(*offered)
            except (OSError, subprocess.SubprocessError) as error:
                if not self._is_closing:
                    logger.warning(
                        "%s was not uploaded to %s (%s); trying again in %g s",
                        offered[0].name, self._repo, reason_of(error), self._interval_s,
                    )  # fmt: skip
            else:
                self._sent = offered
                logger.info("Uploaded %s to %s", offered[0].name, url)

    def _upload(self, checkpoint: Path, message: str) -> str:
        """Upload a checkpoint and return its address.

        Raises:
            OSError, SubprocessError: it failed.
        """
        with tempfile.TemporaryDirectory(prefix="manyhands-upload-") as folder:
            copy = Path(folder) / checkpoint.name  # old checkpoints are deleted while the upload runs
            shutil.copytree(checkpoint, copy)
            with self._news:
                if self._is_closing:
                    raise OSError("the monitor ends")
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", __name__, self._repo, str(copy), message],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                )  # fmt: skip
            try:
                assert process.stdout is not None
                process.wait(MAX_UPLOAD_S)
                lines = process.stdout.read().decode(errors="replace").strip().splitlines()
                last_line = lines[-1] if lines else ""
                if process.returncode:
                    raise OSError(last_line or f"exit code {process.returncode}")
                return last_line
            finally:
                process.kill()
                process.communicate()


def upload(repo: str, folder: str, message: str) -> str:
    """Create the repository if it is missing, and commit a folder to it; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    made = api.create_repo(repo, exist_ok=True)
    api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    return str(made)


def _end_with_parent() -> None:
    """Wait until the parent's end closes the standard input, and exit."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        print(upload(*sys.argv[1:]), flush=True)  # noqa: T201
        code = 0
    except Exception as error:  # noqa: BLE001 (the monitor logs any failure)
        print(reason_of(error), flush=True)  # noqa: T201
        code = 1
    os._exit(code)  # do not wait for threads of libraries
