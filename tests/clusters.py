"""A cluster of CTAs that split K, barrier by barrier: the kernel's own steps of `kernels/split.py`, on agents that take
turns at random.

An agent is a warp that loads or a warp group; what travels (TMA's loads, asynchronous stores, arrivals at other CTAs)
lands at any later time, in any order. Barriers are as in PTX: who waits names a parity, and two phases are told apart.
"""

import random
import threading
from types import SimpleNamespace

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP
from epifuse.providers.cutedsl.kernels import split

_B = 1 << 24  # where B's stages begin


class Turns:
    """Agents as threads of which one runs at a time; whose turn is next is drawn by lot."""

    def __init__(self, seed):
        self.draw, self.agents, self.here = random.Random(seed), [], threading.local()
        self.flying, self.failure = [], None

    def run(self, roles):
        """Until all are at their end."""
        for role in roles:
            agent = SimpleNamespace(go=threading.Event(), back=threading.Event(), ready=lambda: True, over=False)
            agent.thread = threading.Thread(target=self._live, args=(agent, role), daemon=True)
            self.agents.append(agent)
            agent.thread.start()
        while any(not agent.over for agent in self.agents) and self.failure is None:
            able = [agent for agent in self.agents if not agent.over and agent.ready()]
            assert able or self.flying, "all wait for each other"
            if self.flying and (not able or self.draw.random() < 0.3):
                self.flying.pop(self.draw.randrange(len(self.flying)))()
                continue
            agent = self.draw.choice(able)
            agent.go.set()
            agent.back.wait()
            agent.back.clear()
        if self.failure is not None:
            raise self.failure
        assert not self.flying, "something is on its way to a CTA that is gone"

    def _live(self, agent, role):
        self.here.agent = agent
        agent.go.wait()
        agent.go.clear()
        try:
            role()
        except BaseException as error:
            self.failure = error
        agent.over = True
        agent.back.set()

    def wait(self, ready=lambda: True):
        """Of the agent whose turn it is: until `ready`."""
        agent = self.here.agent
        agent.ready = ready
        agent.back.set()
        agent.go.wait()
        agent.go.clear()


class Barrier:
    """An mbarrier."""

    def __init__(self, count):
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, expected=0):
        assert self.pending > 0, "an arrival too many"
        self.pending -= 1
        self.land(-expected)

    def land(self, count):
        """Bytes."""
        self.bytes += count
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def is_over(self, parity):
        return self.phase & 1 != parity


class State:
    """A pipeline's state."""

    def __init__(self, stages, count, flipped):
        self.stages, self.count, self.flipped = stages, count, flipped

    index = property(lambda self: self.count % self.stages)
    phase = property(lambda self: self.count // self.stages % 2 ^ self.flipped)

    def advance(self):
        self.count += 1


class Word(str):
    """A sum, as what was added up in turn."""

    def bitcast(self, _):
        return self

    def __add__(self, other):
        return Word(str(self) + other)


class Cluster:
    """CTAs by rank, each with its barriers and what lies in its stages."""

    def __init__(self, design, k_tiles, tiles, seed):
        self.design, self.k_tiles, self.tiles, self.turns = design, k_tiles, tiles, Turns(seed)
        self.split, self.sums = split.Split(design), {}
        (cm, cn), stages = design.cluster, range(design.stages)
        self.partners = cm * cn  # of one part: with one row or column of CTAs, all share
        readers = self.partners * design.sharing
        self.ctas = [
            SimpleNamespace(
                rank=rank,
                place=(rank % cm, rank // cm % cn, rank // (cm * cn)),
                full=[Barrier(1) for _ in stages],
                empty=[Barrier(readers) for _ in stages],
                opened=[Barrier(1) for _ in stages],
                turn=[0] * MATH_GROUPS,
                sums={},
                blocks={},
                buffers=[_at(0), _at(_B)],
                over=0,
            )
            for rank in range(design.ctas)
        ]

    def run(self):
        """All tiles of the cluster; what each leader then has is in `sums`."""
        roles = [lambda cta=cta: self.load(cta) for cta in self.ctas]
        roles += [lambda cta=cta, g=g: self.multiply(cta, g) for cta in self.ctas for g in range(MATH_GROUPS)]
        self.turns.run(roles)

    # What a step of the kernel asks.

    def view(self, cta):
        """A CTA as `Split` sees it, and its pipeline."""
        opened = _Pointer(self, cta, "opened")
        first, count = self.split.blocks(self.k_tiles, cta.place[2])
        own = SimpleNamespace(
            place=cta.place, opened=opened, buffers=cta.buffers, tiles=(self.k_tiles,), k_first=first, k_tiles=count
        )
        wait, full = self.turns.wait, _Pointer(self, cta, "full")
        pipe = SimpleNamespace(
            sync_object_empty=SimpleNamespace(wait=lambda at, parity: wait(lambda: cta.empty[at].is_over(parity))),
            sync_object_full=SimpleNamespace(get_barrier=lambda at: full + at),
            producer_get_barrier=lambda state: full + state.index,
            consumer_wait=lambda state: wait(lambda at=state.index, parity=state.phase: cta.full[at].is_over(parity)),
            consumer_release=lambda state: self.release(cta, state.index),
        )
        return own, pipe

    def release(self, cta, stage):
        for other in self.partners_of(cta):
            self.fly(other, lambda other=other: other.empty[stage].arrive())

    def partners_of(self, cta):
        return [other for other in self.ctas if other.place[2] == cta.place[2]]

    def fly(self, to, what):
        def land():
            assert to.over < 1 + MATH_GROUPS, f"CTA {to.rank} is gone"
            what()

        self.turns.flying.append(land)

    def fakes(self):
        """What stands for CuTe DSL in `kernels/split.py`."""
        arch = SimpleNamespace(
            elect_one=_Nothing,
            fence_proxy=lambda *_, **__: None,
            sync_warp=lambda: None,
            mbarrier_arrive_and_expect_tx=lambda at, count: at.barrier().arrive(count),
            mbarrier_arrive=lambda at, rank: self.fly(self.ctas[rank], lambda: at.barrier(rank).arrive()),
            mbarrier_wait=lambda at, parity: self.turns.wait(lambda: at.barrier().is_over(parity)),
            store_async_dsmem=self.store,
        )
        cute = SimpleNamespace(
            arch=arch,
            size=lambda count, mode: count,
            AddressSpace=SimpleNamespace(smem=None),
            make_ptr=lambda kind, at, *_, **__: at,
            make_layout=lambda shape: shape,
            make_tensor=lambda at, _: SimpleNamespace(load=lambda: self.turns.here.cta.sums.pop(at)),
        )
        cutlass = SimpleNamespace(
            select_=lambda condition, x, y: x if condition else y,
            range=lambda count, unroll: range(count),
            range_constexpr=range,
        )
        return {"cute": cute, "cutlass": cutlass, "Int32": int}

    def store(self, at, values, full, rank):
        """A warp group's, at once."""
        to, stage = self.ctas[rank], full.index

        def land():
            size = self.split.sizes[at >= _B]
            assert stage == at % _B // size, "in another stage"
            to.blocks.pop(stage, None)
            to.sums[at] = values
            to.full[stage].land(16 * WARP_GROUP)

        self.fly(to, land)

    # The roles, as in `sm90_gemm.py`.

    def load(self, cta):
        own, pipe = self.view(cta)
        state, size = State(self.design.stages, 0, 1), sum(self.split.sizes)
        shared = self.split.sizes[1] // self.partners
        for tile in range(self.tiles):
            for k in range(own.k_tiles):
                pipe.sync_object_empty.wait(state.index, state.phase)
                cta.full[state.index].arrive(size)
                self.fly(cta, lambda at=state.index, what=(tile, own.k_first + k): self.bring(cta, at, what))
                for other in self.partners_of(cta):
                    self.fly(other, lambda other=other, at=state.index: other.full[at].land(shared))
                state.advance()
            for number in range(self.split.received(own.place)):
                self.split.open(number, state, pipe, own)
                state.advance()
        for _ in range(self.design.stages):
            pipe.sync_object_empty.wait(state.index, state.phase)
            state.advance()
        cta.over += 1

    def bring(self, cta, stage, what):
        assert not any(at % _B // self.split.sizes[at >= _B] == stage for at in cta.sums), "sums that were not read"
        cta.blocks[stage] = what
        cta.full[stage].land(self.split.sizes[0])

    def product(self, cta, own, pipe, read, tile):
        for k in range(own.k_tiles):
            pipe.consumer_wait(read)
            assert cta.blocks[read.index] == (tile, own.k_first + k)
            pipe.consumer_release(read)
            read.advance()
        return [Word(f"{tile} {own.place[2]} {i}; ") for i in range(4 * self.split.rounds * self.split.quads)]

    def multiply(self, cta, group):
        self.turns.here.cta = cta
        own, pipe = self.view(cta)
        pingpong, leads = self.design.pingpong, cta.place[2] == 0
        team, within, step = (group, 0, MATH_GROUPS) if pingpong else (0, group, 1)
        read = State(self.design.stages, 0, 0)
        taken = own.k_tiles + (self.split.parts_in_stages if leads else 0)
        to = None if leads else self.split.first(own)
        if pingpong and team == 1:
            read.count += taken
            to = to and self.split.passed(to, own)
            cta.turn[0] += 1
        for tile in range(team, self.tiles, step):
            if pingpong:
                self.turns.wait(lambda: cta.turn[team] > 0)
                cta.turn[team] -= 1
            sums = self.product(cta, own, pipe, read, tile)
            thread = within * WARP_GROUP
            if leads:
                split.Split.gather.__wrapped__(self.split, sums, read, pipe, cta.buffers, thread)
                self.sums[cta.rank, tile, within] = sums
            else:
                self.split.send(sums, to, pipe, own, thread)
                to = self.split.passed(to, own)
            if pingpong:
                cta.turn[1 - team] += 1
                read.count += taken
                to = to and self.split.passed(to, own)
        cta.over += 1


class _Pointer:
    """To a barrier of a CTA."""

    def __init__(self, cluster, cta, kind, index=0):
        self.cluster, self.cta, self.kind, self.index = cluster, cta, kind, index

    def __add__(self, index):
        return _Pointer(self.cluster, self.cta, self.kind, self.index + index)

    def barrier(self, rank=None):
        """Here, or at the same place of another CTA."""
        return getattr(self.cta if rank is None else self.cluster.ctas[rank], self.kind)[self.index]


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def _at(address):
    return SimpleNamespace(iterator=SimpleNamespace(toint=lambda: address))


def stages_of(design):
    """As many as fit beside nothing else."""
    return min(budget.fit(design, (), (), 227 * 1024, 8).stages, 8)
