"""pycoll's core: schedules, proofs, transports and the executor."""

from __future__ import annotations

import collections.abc
import typing

ANY_SOURCE: int
bootstrap: typing.Any
mpi: typing.Any
capi: typing.Any

class Step:
    def replace(
        self,
        *,
        src_mask: int | None = None,
        dst_mask: int | None = None,
        first_chunk: int | None = None,
        num_chunks: int | None = None,
        flags: int | None = None,
    ) -> Step:
        """
        A copy with some fields changed.
        """
    @property
    def dst_mask(self) -> int: ...
    @property
    def dst_peers(self) -> list[int]: ...
    @property
    def final(self) -> bool: ...
    @property
    def first_chunk(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def multicast_dst(self) -> bool: ...
    @property
    def multicast_src(self) -> bool: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def read_local(self) -> bool: ...
    @property
    def round(self) -> int: ...
    @property
    def same_phase(self) -> bool: ...
    @property
    def src_mask(self) -> int: ...
    @property
    def src_peers(self) -> list[int]: ...
    @property
    def write_local(self) -> bool: ...

class Program:
    def with_steps(self, steps: collections.abc.Sequence[Step]) -> Program:
        """
        A copy with other steps.
        """
    @property
    def blocks_per_payload(self) -> int: ...
    @property
    def max_range(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def peers(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def self_position(self) -> int: ...
    @property
    def steps(self) -> list[Step]: ...

class Proof:
    @property
    def error(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def order(self) -> str: ...
    @property
    def slots(self) -> int: ...

class Event:
    @property
    def chunks(self) -> tuple[int, int]: ...
    @property
    def end_s(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def tile(self) -> int: ...

class Simulation:
    @property
    def events(self) -> list[Event]: ...
    @property
    def rank_time_s(self) -> list[float]: ...
    @property
    def sent_bytes(self) -> list[int]: ...
    @property
    def time_s(self) -> float: ...

class FabricLevel:
    def __init__(
        self,
        name: str,
        size: int,
        num_links: int,
        rails: bool,
        carries_outside: bool,
        link_bytes_per_s: float,
        latency_s: float,
        pair_bytes_per_s: collections.abc.Sequence[float],
        pair_latency_s: collections.abc.Sequence[float],
    ) -> None: ...

class Fabric:
    def __init__(self, levels: collections.abc.Sequence[FabricLevel]) -> None: ...
    def latency_s(self, src: int, dst: int) -> float: ...
    def link_bytes_per_s(self, link: int) -> float: ...
    def link_name(self, link: int) -> str: ...
    def ranks_per_unit(self, level: int) -> int: ...
    def route(self, src: int, dst: int) -> list[int]: ...
    def scale_links(self, level: int, member: int, factor: float) -> None: ...
    def set_ranks(
        self,
        overhead_s: collections.abc.Sequence[float],
        gamma_s_per_byte: collections.abc.Sequence[float],
        start_s: collections.abc.Sequence[float],
    ) -> None: ...
    @property
    def num_links(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...

class LevelLoad:
    @property
    def busiest_bytes_per_s(self) -> float: ...
    @property
    def busiest_fraction(self) -> float: ...
    @property
    def busiest_link(self) -> int: ...
    @property
    def bytes_per_s(self) -> float: ...
    @property
    def fraction(self) -> float: ...
    @property
    def num_links(self) -> int: ...

class FlowResult:
    @property
    def bin_s(self) -> float: ...
    @property
    def level_nbytes(self) -> list[list[float]]: ...
    @property
    def num_messages(self) -> int: ...
    @property
    def num_shares(self) -> int: ...
    @property
    def rank_time_s(self) -> list[float]: ...
    @property
    def time_s(self) -> float: ...

class FlowWorld:
    def __init__(
        self,
        fabric: Fabric,
        collective: str,
        algorithm: str,
        root: int,
        groups: collections.abc.Sequence[int],
        between: str,
        may_compress: bool,
    ) -> None: ...
    @staticmethod
    def of_programs(
        fabric: Fabric, programs: collections.abc.Sequence[Program], may_compress: bool
    ) -> FlowWorld: ...
    def simulate(
        self,
        nbytes: float,
        tile_fraction: float,
        slots: int,
        seed: int,
        message_s: float,
        num_bins: int,
        max_messages: int,
        progress: collections.abc.Callable[[float], None] | None = None,
    ) -> FlowResult: ...
    @property
    def loads(self) -> list[LevelLoad]: ...
    @property
    def num_actors(self) -> int: ...
    @property
    def num_messages(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...

class AlgorithmInfo:
    def sent_fraction(self, n: int, rank: int, root: int = 0) -> float:
        """
        Amount that `rank` sends, in units of the message.
        """
    @property
    def collective(self) -> str: ...
    @property
    def cost(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...

class CollectiveInfo:
    def blocks_per_payload(self, n: int) -> int: ...
    def num_blocks(self, n: int) -> int: ...
    def busbw_factor(self, n: int) -> float: ...
    @property
    def has_op(self) -> bool: ...
    @property
    def has_root(self) -> bool: ...
    @property
    def name(self) -> str: ...

class Schedule:
    def goal(self, rank: int, chunk: int) -> tuple[str, int]:
        """
        (kind, rank whose start value it is).
        """
    def programs(
        self,
        fuse: bool = True,
        multicast: bool = True,
        join_blocks: bool = True,
        join_chunks: bool = True,
        phases: bool = False,
    ) -> list[Program]: ...
    def starts_with_value(self, rank: int, chunk: int) -> bool: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def chunks_per_message(self) -> int: ...
    @property
    def collective(self) -> str: ...
    @property
    def moves(self) -> list[tuple[int, str, int, int, int, int]]: ...
    @property
    def multicast(self) -> bool: ...
    @property
    def n(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def root(self) -> int: ...

class SharedMemory:
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class Work:
    def done(self) -> bool: ...
    def exception(self) -> typing.Any: ...
    def wait(self, timeout_s: float) -> bool: ...

class MessageWork:
    def done(self) -> bool: ...
    def exception(self) -> typing.Any: ...
    def wait(self, timeout_s: float) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def source(self) -> int | None: ...

class GroupRecords:
    def __init__(self, handle: typing.Any, description: str) -> None: ...
    def _group(self) -> dict[str, typing.Any]: ...
    def _messages(self, rank: int, at_most: int = 1024) -> list[dict[str, typing.Any]]: ...
    def _ranks(self) -> list[dict[str, typing.Any]]: ...
    def _records(self, rank: int, at_most: int = 1024) -> list[dict[str, typing.Any]]: ...
    def _set_on_failure(self, arg0: typing.Any) -> None: ...
    def _set_stack_writer(self, arg0: int, arg1: int) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def description(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...

class DeviceWork:
    def done(self) -> bool: ...
    def exception(self) -> typing.Any: ...
    def given(self, timeout_s: float) -> bool: ...
    def hold(self) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...

class DeviceMemory:
    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __dlpack__(self, stream: typing.Any = None) -> typing.Any: ...
    def copy_from_host(self, array: typing.Any, offset: int = 0, stream: int = 0) -> None: ...
    def copy_to_host(self, array: typing.Any, offset: int = 0, stream: int = 0) -> None: ...

class DeviceStream:
    def __init__(self, device: int = 0) -> None: ...
    @property
    def handle(self) -> int: ...
    def begin_capture(self) -> None: ...
    def end_capture(self) -> int: ...
    def hold(self, other: int) -> None: ...
    def launch(self, graph: int) -> None: ...
    def synchronize(self) -> None: ...

def device_info() -> dict[str, typing.Any]: ...
def device_of(address: int) -> int: ...

class Communicator:
    def send(
        self,
        x: typing.Any,
        peer: int,
        tag: int = 0,
        *,
        async_op: bool = False,
    ) -> typing.Any: ...
    def recv(
        self,
        x: typing.Any,
        peer: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
    ) -> typing.Any: ...
    def recv_any(self, x: typing.Any, tag: int = 0) -> int: ...
    def _group(self) -> dict[str, typing.Any]: ...
    def _ranks(self) -> list[dict[str, typing.Any]]: ...
    def _messages(self, rank: int, at_most: int = 1024) -> list[dict[str, typing.Any]]: ...
    def _records(self, rank: int, at_most: int = 1024) -> list[dict[str, typing.Any]]: ...
    def _set_on_failure(self, arg0: typing.Any) -> None: ...
    def _set_stack_writer(self, arg0: int, arg1: int) -> None: ...
    def all_gather(
        self,
        x: typing.Any,
        out: typing.Any = None,
        *,
        counts: collections.abc.Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def all_reduce(
        self,
        x: typing.Any,
        op: typing.Any = "sum",
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
    ) -> typing.Any: ...
    def all_to_all(
        self,
        x: typing.Any,
        out: typing.Any = None,
        send_counts: collections.abc.Sequence[int] | None = None,
        recv_counts: collections.abc.Sequence[int] | None = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def barrier(
        self,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def broadcast(
        self,
        x: typing.Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def exscan(
        self,
        x: typing.Any,
        op: typing.Any = "sum",
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
    ) -> typing.Any: ...
    def gather(
        self,
        x: typing.Any,
        root: int = 0,
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def neighbor_exchange(
        self,
        x: typing.Any,
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def reduce(
        self,
        x: typing.Any,
        root: int = 0,
        op: typing.Any = "sum",
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
    ) -> typing.Any: ...
    def reduce_scatter(
        self,
        x: typing.Any,
        op: typing.Any = "sum",
        out: typing.Any = None,
        *,
        counts: collections.abc.Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
    ) -> typing.Any: ...
    def scan(
        self,
        x: typing.Any,
        op: typing.Any = "sum",
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
    ) -> typing.Any: ...
    def scatter(
        self,
        x: typing.Any,
        root: int = 0,
        out: typing.Any = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> typing.Any: ...
    def __init__(self, arg0: Communicator) -> None: ...
    def _add_schedule(self, arg0: Schedule) -> None: ...
    def _begin_batch(self) -> None: ...
    def _drop_batch(self) -> None: ...
    def _run_batch(self) -> None: ...
    @property
    def _is_coalescing(self) -> bool: ...
    @property
    def _carries_devices(self) -> bool: ...
    def _allocate(self, nbytes: int) -> SharedMemory: ...
    def _allocate_on_device(self, arg0: int, arg1: int) -> DeviceMemory: ...
    def _synchronize(self) -> None: ...
    def _register(self, arg0: object) -> str: ...
    def _unregister(self, arg0: object) -> bool: ...
    def _disown(self) -> None: ...
    def _explain(self, arg0: str, arg1: int, arg2: int, arg3: bool, arg4: bool) -> str: ...
    def _split(self, arg0: int, arg1: int) -> Communicator | None: ...
    def _check_alive(self, ranks: collections.abc.Sequence[int]) -> None:
        """
        Raises PeerDiedError if one of the ranks is a process of this host that has ended.
        """

    def _announce_deaths(self) -> None: ...
    def _abort(self, arg0: str) -> None: ...
    def close(self) -> None: ...
    deterministic: bool
    register_after: int
    timeout_s: float
    @property
    def host_rank(self) -> int: ...
    @property
    def host_number(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def ledger(self) -> dict: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transport(self) -> str: ...

class SegmentView:
    def __init__(self, path: str) -> None: ...
    def group(self) -> dict[str, typing.Any]: ...
    def ranks(self) -> list[dict[str, typing.Any]]: ...
    def messages(self, rank: int, at_most: int = 1024) -> list[dict[str, typing.Any]]: ...
    def records(self, rank: int, at_most: int = 1024) -> list[dict[str, typing.Any]]: ...

class LocalWorld:
    pass

class Predictor:
    """
    Simulates the same messages under several costs.
    """
    def __init__(
        self,
        cases: collections.abc.Sequence[tuple[str, str, int]],
        protocol: str,
        arrays: str,
        n: int,
        cores: int,
    ) -> None: ...
    def times(self, alpha: float, beta: float, gamma: float) -> list[float]: ...

class TunedCost:
    def __init__(
        self,
        num_ranks: int,
        num_cores: int,
        arrays: str,
        date: str,
        protocol: str,
        alpha_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float,
    ) -> None: ...
    @property
    def arrays(self) -> str: ...
    @property
    def alpha_s(self) -> float: ...
    @property
    def beta_s_per_byte(self) -> float: ...
    @property
    def date(self) -> str: ...
    @property
    def gamma_s_per_byte(self) -> float: ...
    @property
    def num_cores(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def protocol(self) -> str: ...

class TunedSize:
    def __init__(
        self,
        collective: str,
        num_ranks: int,
        num_cores: int,
        arrays: str,
        nbytes: int,
        date: str,
        times: collections.abc.Mapping[str, float],
    ) -> None: ...
    @property
    def arrays(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def date(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_cores(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def times(self) -> dict[str, float]: ...

class TuningTable:
    """
    A table of this version and machine, or one that was parsed.
    """
    def __init__(
        self,
        costs: collections.abc.Sequence[TunedCost],
        sizes: collections.abc.Sequence[TunedSize],
    ) -> None: ...
    @staticmethod
    def parse(text: str) -> TuningTable: ...
    def to_text(self) -> str: ...
    @property
    def costs(self) -> list[TunedCost]: ...
    @property
    def machine(self) -> str: ...
    @property
    def sizes(self) -> list[TunedSize]: ...
    @property
    def version(self) -> str: ...

def _im2col(
    out: typing.Any,
    x: typing.Any,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    """
    out <- the patches of x, of shape [N, C, H, W]; out has [N, C * kh * kw, patches].
    """

_mutex_bytes: int

def _make_mutex(memory: typing.Any) -> None:
    """
    Makes a mutex for several processes in an array of _mutex_bytes bytes that they share.
    """

def _factorize(
    p: typing.Any,
    q: typing.Any,
    users: typing.Any,
    items: typing.Any,
    ratings: typing.Any,
    mean: float,
    rate: float,
    l2: float,
    lock: int,
    mutex: typing.Any,
) -> float:
    """
    Steps factors of ratings by each rating in turn; returns the sum of squared errors.
    """

def _step_logistic(
    weights: typing.Any,
    starts: typing.Any,
    features: typing.Any,
    values: typing.Any,
    labels: typing.Any,
    order: typing.Any,
    rate: float,
    lock: int,
    mutex: typing.Any,
) -> float:
    """
    Steps a logistic regression by examples in turn; returns the sum of the losses, nats.
    """

def _copy_bytes(dst: typing.Any, src: typing.Any, streaming: bool = False) -> None:
    """
    dst <- src, byte for byte.
    """

def _reduce_copy(
    srcs: collections.abc.Sequence[typing.Any],
    dsts: collections.abc.Sequence[typing.Any],
    dtype: str,
    op: str,
    divisor: int = 1,
    streaming: bool = False,
    first_to_peer: int | None = None,
    past_caches: bool = False,
) -> None:
    """
    dsts <- reduce(srcs), all contiguous buffers of one size, read as elements of dtype.
    """

def dtypes() -> list[tuple[str, str, int]]: ...
def ops() -> list[str]: ...
def why_unsupported(dtype: str, op: str) -> str: ...
def _check_op(dtype: str, op: str) -> None: ...
def _scale(dst: typing.Any, src: typing.Any, dtype: str, factor: float) -> None: ...
def algorithms() -> list[AlgorithmInfo]: ...
def build_info() -> dict:
    """
    Features of this build of the core.
    """

def builtin_cost(protocol: str, arrays: str, n: int, cores: int) -> tuple[float, float, float]:
    """
    alpha, beta and gamma.
    """

def build_hierarchical(collective: str, n: int, ranks_per_host: int, root: int = 0) -> Schedule: ...
def build_schedule(collective: str, algorithm: str, n: int, root: int = 0) -> Schedule: ...
def choices(collective: str, nbytes: int) -> list[str]: ...
def collectives() -> list[CollectiveInfo]: ...
def explain_programs(schedule: Schedule, programs: collections.abc.Sequence[Program]) -> str: ...
def explain_step(program: Program, step: Step) -> str: ...
def exponential_delay_s(seed: int, stream: int, idx: int, mean_s: float) -> float:
    """
    A random delay that depends on the arguments alone.
    """

max_ranks: int

def connect_ranks(
    store: typing.Any,
    rank: int,
    num_ranks: int,
    name: str,
    token: str,
    timeout_s: float,
    old: Communicator | None = ...,
    members: collections.abc.Sequence[int] = ...,
) -> Communicator:
    """
    Connects ranks that meet in a store, `members` of `old` among them; PeerDiedError if one of
    those ends.
    """

def init_from_environment(arg0: float) -> tuple[Communicator, typing.Any]: ...
def init_at(env: typing.Any, timeout_s: float) -> tuple[Communicator, typing.Any]: ...
def init_over_mpi(handle: int, timeout_s: float) -> tuple[Communicator, typing.Any]: ...
def init_local(arg0: LocalWorld, arg1: int, arg2: float) -> Communicator: ...
def make_local_world(arg0: int) -> LocalWorld: ...
def machine_fingerprint() -> str: ...
def min_safe_slots(
    schedule: Schedule, programs: collections.abc.Sequence[Program], max_slots: int
) -> tuple[int, str]:
    """
    (smallest proved slot count or 0, why max_slots is not proved).
    """

def pays_to_copy(collective: str, nbytes: int) -> bool:
    """
    Whether `direct` copies plain arrays of so many bytes to where peers access them.
    """

def reduce_copy_isa() -> str:
    """
    The instruction set in use: avx512, avx2 or generic.
    """

def schedule_from_moves(
    collective: str,
    name: str,
    n: int,
    num_chunks: int,
    root: int,
    moves: collections.abc.Sequence[tuple[int, str, int, int, int, int]],
    multicast: bool = True,
) -> Schedule: ...
def simulate_programs(
    programs: collections.abc.Sequence[Program],
    nbytes: int,
    tile_bytes: int,
    slots: int,
    alpha: collections.abc.Sequence[float],
    beta: collections.abc.Sequence[float],
    gamma: collections.abc.Sequence[float],
) -> Simulation: ...
def time_calls(
    comm: Communicator,
    collective: str,
    x: typing.Any,
    out: typing.Any,
    algorithm: str,
    num_calls: int,
) -> float:
    """
    Seconds per call on this rank; x and out hold a message each.
    """

def tuning_table_note() -> str:
    """
    Origin of the measured table, or the reason why there is none.
    """

def tuning_table_path() -> str: ...
def verify_programs(
    schedule: Schedule, programs: collections.abc.Sequence[Program], slots: int
) -> Proof: ...
