"""The common part of ``manyhands train`` and ``manyhands join``, once the run is known."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from manyhands.averaging.messages import readable_addresses
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, ManifestMismatch, MissingExtra
from manyhands.base.folder_lock import LOCK_NAME, FolderInUse
from manyhands.base.identity import PeerId
from manyhands.checkpoints.checkpoint_dir import CheckpointDir
from manyhands.cli.loading import finish_loading
from manyhands.cli.options import NetworkOptions, OutputOptions, PeerOptions
from manyhands.cli.output.event_file import EventWriter
from manyhands.cli.output.logs import name_in_logs
from manyhands.cli.output.training_view import run_in_view
from manyhands.cli.run_look_up import begin_or_look_up
from manyhands.cli.run_to_follow import wait_for_trainers
from manyhands.cli.ticket_command import print_tickets
from manyhands.cli.trainer_curves import TrainerCurves
from manyhands.cli.web_page import page_beside
from manyhands.optim.run.run_records import Run, declare_run
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe, RunToJoin, adopted, is_recipe
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data import given as given_data
from manyhands.recipes.albert.data.corpus import check_text
from manyhands.recipes.albert.data.run_data import OF_PYTHON, RunData, data_for_run, data_of
from manyhands.recipes.albert.memory import check_address_space, check_memory
from manyhands.recipes.albert.settings import TrainingSettings, own_rank
from manyhands.state_dir import StateDir, addresses_of_running

logger = logging.getLogger(__name__)

Tell = Callable[[msgspec.Struct], None]
Folder = TypeVar("Folder")
MAX_FOLDERS = 64
ALBERT_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "blake3", "safetensors")
"""The packages that a trainer imports. All are checked, since a machine may have some of them for other reasons."""
WORTH_NOTHING = {LOCK_NAME, "identity.pem", "port", "addresses", "peers.json"}
"""The files that a start writes into a new folder before it takes part in a run."""
NOTE_TIMEOUT_S = 5.0
MEET_TIMEOUT_S = 10.0


def check_before(network: NetworkOptions, training: TrainingSettings, given: Mapping[str, Any]) -> None:
    """Check everything that can be checked without a network.

    Raises:
        ConfigError: the text or the data cannot be used, or options contradict each other.
    """
    if training.auxiliary and network.client_mode is True:
        raise ConfigError(
            "--auxiliary helps peers that nobody can dial, so others must dial it: leave out --client-mode"
        )
    if training.auxiliary and not network.initial_peers:
        raise ConfigError("--auxiliary helps a run that is there: name one of its peers, --initial-peers ADDRESS")
    if text := given.get("text"):  # Python's own documentation needs no check
        check_text(text)
    if not network.initial_peers:
        given = given_data.or_found_here(given)  # the data of the run that this peer begins
    given_data.settings_of(given)
    if given.get("dataset_path") and not given.get("tokenizer") and not network.initial_peers:
        raise ConfigError(
            f"the samples in {given['dataset_path']} need the tokenizer that they were made with; name its folder: "
            "--tokenizer FOLDER"
        )


def with_data(training: TrainingSettings, given: Mapping[str, Any], output: OutputOptions) -> dict[str, Any]:
    """The given settings with the named data, as :func:`given_data.found`; an auxiliary peer needs none.

    Raises:
        MissingExtra: the packages of ``manyhands[albert]`` are not installed.
        ConfigError: several sources of data were named, or an archive cannot be used.
    """
    require_albert()  # first, since all code that reads data imports these packages
    return dict(given) if training.auxiliary else found_data(given, output)


def found_data(given: Mapping[str, Any], output: OutputOptions) -> dict[str, Any]:
    """Like :func:`given_data.found`; the log begins before an archive is fetched, on one rank only."""
    return given_data.found(given, output.begin_log if own_rank() == 0 else lambda: None)


def require_albert() -> None:
    """Check for the recipe's packages, and that there is room for them, without importing them.

    Raises:
        MissingExtra: the packages of ``manyhands[albert]`` are not installed.
        ConfigError: a limit of the shell leaves too little address space.
    """
    if any(importlib.util.find_spec(name) is None for name in ALBERT_PACKAGES):
        raise MissingExtra("the ALBERT recipe", "albert")
    check_address_space()


def is_further_rank(training: TrainingSettings) -> bool:
    """Under ``torchrun``, run a rank other than 0 until rank 0 ends, and return True; return False on rank 0."""
    if own_rank() == 0:
        return False
    from manyhands.recipes.albert.ranks import compute_along

    compute_along(training)
    return True


class OwnFolders(NamedTuple):
    """The folders of this peer, locked by this process until they are closed."""

    state_dir: StateDir | None
    checkpoint_dir: CheckpointDir | None

    def close(self) -> None:
        for folder in self:
            if folder is not None:
                folder.close()


class Start(ExitStack):
    """Undoes the steps of a start if it fails before :meth:`has_succeeded`."""

    def removes(self, folder: Path) -> None:
        """After a failure, remove a new folder, unless it has files that are worth keeping, such as a lease."""

        def remove(kind: object, error: BaseException | None, traceback: object) -> None:
            if isinstance(error, Exception):
                with suppress(OSError):
                    if {entry.name for entry in folder.iterdir()} <= WORTH_NOTHING:
                        shutil.rmtree(folder)

        self.push(remove)

    def tells_of_ctrl_c(self) -> None:
        """After Ctrl-C, log that nothing was computed. Once the training has begun, a summary is printed instead."""

        def tell(kind: object, error: BaseException | None, traceback: object) -> None:
            if isinstance(error, KeyboardInterrupt):
                logger.info("Stopped before the training began: this machine has computed nothing for the run")

        self.push(tell)

    def has_succeeded(self) -> None:
        self.pop_all()


def take_part(
    run_id: str,
    network: NetworkOptions,
    training: TrainingSettings,
    given: Mapping[str, Any],
    output: OutputOptions,
    *,
    run: Run | None,
    start_new: bool | None = None,
    page: socket.socket | None = None,
) -> None:
    """Train in a run until it is time to stop.

    Args:
        given: settings of the recipe that the user named.
        run: the run as found before this peer joined; None if this peer may begin it.
        start_new: as for :class:`manyhands.Optimizer`. If it is False, a run without settings is an error.
        page: bound address of the page of the run; None for no page.
    Raises:
        ConfigError: this peer does not fit the run, or has too little memory.
        RunNotFound: the run has no settings, and ``start_new`` is False.
    """
    to_join = _run_to_join(run, training, given, output) if run is not None else None  # before creating any files
    with ExitStack() as cleanup:
        events = output.begin()
        if training.device != "auto":
            finish_loading()
            from manyhands.recipes.albert.compute import Compute

            Compute(training.device, training.precision)
        emit = told_to(events, training)
        folders = open_folders(run_id, network, training)
        cleanup.callback(folders.close)
        start = cleanup.enter_context(Start())
        start.tells_of_ctrl_c()
        if folders.checkpoint_dir is not None and folders.checkpoint_dir.is_new:
            start.removes(folders.checkpoint_dir.path)
        if training.auxiliary and network.client_mode is None:
            network = replace(network, client_mode=False)  # in client mode it could not help
        peer = cleanup.enter_context(network.connect(own_dir=folders.state_dir))
        name_in_logs(run=run_id, peer=str(peer.peer_id))
        _declare(peer, run_id)  # at once: others may be looking for the run
        meet_peers_here(peer, run_id, network)
        own_dir = folders.state_dir.path if folders.state_dir is not None else None
        cleanup.enter_context(page_beside(peer, run_id, page, network.state_dir or own_dir))
        is_waiting = to_join is None and training.auxiliary
        if is_waiting:
            _tell_how_to_join(peer, run_id)  # trainers may need this peer's address to come
            run = wait_for_trainers(peer, run_id)
        elif to_join is None:  # the known peers may be of an earlier start
            run = begin_or_look_up(peer, run_id, may_begin=start_new is not False)
        is_kept = folders.checkpoint_dir is not None and folders.checkpoint_dir.newest_run() is not None
        begins = "Going on with" if is_kept else "Beginning"
        logger.info("%s run %s as peer %s", "Joining" if run and run.manifest else begins, run_id, peer.peer_id)
        if not is_waiting:
            _tell_how_to_join(peer, run_id)
        if run is not None:
            to_join = to_join or _run_to_join(run, training, given, output)
            _note_peers(peer, run)
        if training.auxiliary:
            assert to_join is not None
            start.has_succeeded()
            _help(peer, run_id, to_join, training)
        else:
            if to_join is not None:
                recipe, data = to_join.recipe.recipe, to_join.recipe.data
            else:
                recipe, data = _recipe_to_begin(run_id, training, given, folders)
            is_beginning = run is None or run.manifest is None
            _train(
                peer, run_id, recipe, data, training, emit, to_join, folders, start,
                start_new=True if is_beginning and start_new is None else start_new,
                is_chosen="batch_size" in given,
            )  # fmt: skip


def _tell_how_to_join(peer: Peer, run_id: str) -> None:
    members = peer.presence.members.get(run_id)
    if peer.addresses and (members is None or members.charter.is_open):
        logger.info("Others can join through this peer: --initial-peers %s", " ".join(peer.addresses))


def told_to(events: EventWriter, training: TrainingSettings) -> Tell:
    """The function that takes the events of a trainer: event file, and curves if wanted.

    Raises:
        MissingExtra: the package for curves is not installed.
        ConfigError: the folder for curves cannot be written.
    """
    if training.tensorboard is None:
        return events
    curves = TrainerCurves(training.tensorboard)

    def tell(event: msgspec.Struct) -> None:
        events(event)
        curves(event)

    return tell


def _help(peer: Peer, run_id: str, run: RunToJoin, training: TrainingSettings) -> None:
    finish_loading()
    from manyhands.recipes.albert.auxiliary import AlbertAuxiliary

    AlbertAuxiliary(peer, run_id, run, training).run()


def _train(
    peer: Peer,
    run_id: str,
    recipe: AlbertRecipe,
    data: RunData,
    training: TrainingSettings,
    emit: Tell,
    run: RunToJoin | None,
    folders: OwnFolders,
    start: Start,
    *,
    start_new: bool | None,
    is_chosen: bool,
) -> None:
    finish_loading()
    from manyhands.recipes.albert.training import AlbertTrainer

    trainer = AlbertTrainer(
        peer, run_id, recipe, training, emit,
        run=run, data=data, start_new=start_new, is_batch_size_chosen=is_chosen,
        checkpoint_dir=folders.checkpoint_dir,
    )  # fmt: skip
    members = peer.presence.members.get(run_id)
    if members is not None and not members.charter.is_open:
        logger.info("Others join this run with a ticket of its coordinator, which makes it with: manyhands invite")
    elif peer.addresses:
        logger.info("Others can join this run with one word:")
        charter = members.charter.digest if members is not None else b""
        print_tickets(peer, run_id, trainer.manifest.fingerprint(), charter=charter)
    start.has_succeeded()
    run_in_view(trainer)


def open_folders(run_id: str, network: NetworkOptions, training: TrainingSettings) -> OwnFolders:
    """Open the named folders, or else ``./manyhands-RUN_ID``, or the first of ``-2``, ``-3`` ... that is not in use.

    Raises:
        ConfigError: a folder cannot be used.
    """
    if training.no_checkpoints or training.auxiliary:
        return OwnFolders(None, None)  # the peer opens a named state dir itself
    if training.checkpoint_dir is not None:
        return _open_folder(training.checkpoint_dir, run_id, network, training)
    try:
        return first_free(trainer_folder(run_id), lambda path: _open_folder(path, run_id, network, training))
    except ConfigError as error:
        raise ConfigError(f"{error}; --checkpoint-dir names one, --no-checkpoints needs none") from error


def first_free(name: str, open_folder: Callable[[Path], Folder]) -> Folder:
    """Open ``./NAME``, or the first of ``-2``, ``-3`` ... that no other process uses.

    Raises:
        ConfigError: a folder cannot be used.
    """
    for path in _folders(name):
        try:
            opened = open_folder(path)
        except FolderInUse:  # another one was started here
            continue
        if path != Path(name):
            logger.info("%s is in use by another process: this one uses %s", name, path)
        return opened
    raise ConfigError(f"{MAX_FOLDERS} processes use {name}, {name}-2 and so on")


def own_folder(name: str, network: PeerOptions) -> StateDir | None:
    """Open a folder for the id and port of a peer if the options name none: others join with its address.

    Args:
        name: it has a dot, which no run id has, so that it is not the folder of a trainer.
    Returns:
        None if the options name a folder or an identity, or if no folder can be created.
    """
    if network.state_dir is not None or network.identity is not None:
        return None
    try:
        return first_free(name, StateDir)
    except ConfigError as error:
        logger.warning(
            "%s. Without a state dir (--state-dir DIR), each start has another id and port, and old tickets are void",
            error,
        )
        return None


def _folders(name: str) -> Iterator[Path]:
    """The names of the folders of processes that are started in one place, in order."""
    yield Path(name)
    for number in range(2, MAX_FOLDERS + 1):
        yield Path(f"{name}-{number}")


def with_peers_here(network: NetworkOptions, run_id: str, output: OutputOptions) -> NetworkOptions:
    """If no initial peers are named, use a monitor or trainer of the run that was started in this folder."""
    if network.initial_peers or own_rank() > 0:
        return network
    for path, addresses in _running_here(run_id):
        output.begin_log()
        logger.info(
            "A peer of run %s runs in this folder (%s), and this one joins through it. To begin another run, "
            "give it another name: --run-id NAME", run_id, path,
        )  # fmt: skip
        return replace(network, initial_peers=tuple(addresses))
    return network


def meet_peers_here(peer: Peer, run_id: str, network: NetworkOptions) -> None:
    """Join those that were started in this folder while this peer started, and did not see each other before.

    Each of them looks after it has written its own addresses, so one at least sees the other.
    """
    if network.initial_peers:
        return
    if others := list(_running_here(run_id)):
        logger.info("Another peer of run %s was started in this folder (%s)", run_id, others[0][0])
        parsed = [Address.parse(address) for _, addresses in others for address in addresses]
        peer.run(peer.dht.join(parsed, must_join=False), MEET_TIMEOUT_S, "meeting the peers in this folder")


def _running_here(run_id: str) -> Iterator[tuple[Path, list[str]]]:
    """The monitors and trainers of a run that others have started in this folder, with their addresses."""
    for name in (monitor_folder(run_id), trainer_folder(run_id)):
        for path in takewhile(Path.is_dir, _folders(name)):
            if addresses := addresses_of_running(path):
                yield path, addresses


def trainer_folder(run_id: str) -> str:
    """Name of the folder that a trainer has by default."""
    return f"manyhands-{run_id}"


def monitor_folder(run_id: str) -> str:
    """Name of the folder that a monitor has by default. A trainer of any run has another one: a run id has no dot."""
    return f"manyhands-{run_id}.monitor"


def _open_folder(path: Path, run_id: str, network: NetworkOptions, training: TrainingSettings) -> OwnFolders:
    checkpoint_dir = CheckpointDir(path, run_id, training.keep_checkpoints)
    try:
        return OwnFolders(StateDir(path) if network.state_dir is None else None, checkpoint_dir)
    except ConfigError:
        checkpoint_dir.close()
        raise


def _run_to_join(
    run: Run, training: TrainingSettings, given: Mapping[str, Any], output: OutputOptions
) -> RunToJoin | None:
    """The run and the recipe that this peer takes over, checked against its data and memory.

    Returns:
        None if the run has no manifest.
    """
    if run.manifest is None:
        return None
    found = _with_data(run.run_id, adopted(run.run_id, run.manifest.extra, given), training, given, output.begin_log)
    return RunToJoin(found, sorted(run.signers, key=lambda peer_id: not _can_be_dialled(run, peer_id)))


def _recipe_to_begin(
    run_id: str, training: TrainingSettings, given: Mapping[str, Any], folders: OwnFolders
) -> tuple[AlbertRecipe, RunData]:
    """The recipe and the data of this peer's newest checkpoint, or else the given ones."""
    saved = folders.checkpoint_dir.newest_run() if folders.checkpoint_dir is not None else None
    facts = saved.extra if saved is not None else {}
    if not is_recipe(facts):
        given = given_data.or_found_here(given)
        recipe = AlbertRecipe(**given_data.settings_of(given) | dict(given))
        check_memory(run_id, recipe, recipe.vocab_size)
        if recipe.local_steps and not {"target_batch_size", "learning_rate"} <= given.keys():
            logger.warning(
                "Local steps with --target-batch-size %d and --learning-rate %g. The defaults suit synchronous steps: "
                "the trial stops at batches of a 64th of the target, and the best rate is another, lower or higher. "
                "docs/how-to/local-steps.md advises --target-batch-size 8192 --learning-rate 0.003",
                recipe.target_batch_size, recipe.learning_rate,
            )  # fmt: skip
        data = data_of(given)
        if data != OF_PYTHON and not data.urls:
            why = (
                "is on this machine, or may hold a password" if recipe.dataset_url else "was not given (--dataset-url)"
            )
            logger.info(
                "The run names no address for its data, since that %s: peers that join must name the same data, with "
                "--text, --dataset-path or --dataset-url", why,
            )  # fmt: skip
        return recipe, data
    try:
        found = adopted(run_id, facts, given)
    except ManifestMismatch as error:
        differences = "; ".join(error.differences).replace("in the run", "in the checkpoint")
        assert folders.checkpoint_dir is not None
        raise ConfigError(
            f"checkpoint {folders.checkpoint_dir.newest_path()} was made with other settings: {differences}. Give the "
            "same ones, or another --checkpoint-dir"
        ) from None
    found = _with_data(run_id, found, training, given)
    return found.recipe, found.data


def _with_data(
    run_id: str,
    found: RunRecipe,
    training: TrainingSettings,
    given: Mapping[str, Any],
    begin_log: Callable[[], object] = lambda: None,
) -> RunRecipe:
    """The recipe of a run with the data that this peer trains on, after checking memory and data."""
    check_memory(run_id, found.recipe, found.vocab_size)
    if training.auxiliary:
        return found
    given = data_for_run(run_id, found.data, given, any_text=training.any_text, begin_log=begin_log)
    found = found.with_own(given)
    given_data.check_given_data(run_id, given, found.recipe, found.tokenizer)
    return found


def _can_be_dialled(run: Run, peer_id: PeerId) -> bool:
    return peer_id in run.peers and not run.peers[peer_id].is_client


def _declare(peer: Peer, run_id: str) -> None:
    async def declare() -> None:
        declare_run(peer.dht, run_id)

    peer.run(declare(), NOTE_TIMEOUT_S, "declaring the run")


def _note_peers(peer: Peer, run: Run) -> None:
    """Note the addresses of the run's peers, to ask them for the tokenizer, and how far they were."""

    async def note() -> None:
        others = {peer_id: record for peer_id, record in run.peers.items() if peer_id != peer.peer_id}
        for peer_id, record in others.items():
            peer.endpoint.learn(peer_id, readable_addresses(record.addresses))
        # noted now, since they may have left when this peer has its data
        steps, seen = peer.presence.run_steps, [record.position.step for record in others.values()]
        steps[run.run_id] = max([steps.get(run.run_id, 0), *seen])

    peer.run(note(), NOTE_TIMEOUT_S, "noting the peers of the run")
