"""Explore every state that a world of plain Python objects can reach, breadth first, and check that its ends can be reached.

Knows: copying, comparing and numbering states, shortest stories, reachability. Does not know what the states mean.
"""

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, Generic, NamedTuple, TypeVar

NORMAL, PATIENCE, DAMAGE = range(3)
"""Kinds of moves: work; a lease end, abort or impatience; loss, error or crash."""

WorldT = TypeVar("WorldT")


class Violation(Exception):
    """An invariant does not hold."""


class Move(NamedTuple):
    """`apply` changes a world that nobody else has."""

    label: str
    kind: int
    apply: Callable[[Any], None]


@dataclass(frozen=True)
class CanReach(Generic[WorldT]):
    """From every state that `applies`, one with `goal` must be reachable by moves of kind `worst` or better."""

    name: str
    applies: Callable[[WorldT], bool]
    goal: Callable[[WorldT], bool]
    worst: int


@dataclass(frozen=True)
class Result:
    """violation: empty if none. path: labels of the shortest way to it."""

    num_states: int
    num_moves: int
    violation: str
    path: tuple[str, ...]


# -- copies and keys ---------------------------------------------------------------------------------------------------


@unique
class Shape(Enum):
    """What a field that changes in place holds; every other field holds a value that may be shared."""

    FLAT = "a list, set or dictionary of unchanging things"
    SETS = "a list of sets"
    LISTS = "a list of lists or of ordered dictionaries, whose keys count"
    DICT_OF_SETS = "a dictionary of sets"
    OBJECT = "an object of the codec"
    LIST_OF_OBJECTS = "a list of them"
    DICT_OF_OBJECTS = "a dictionary of them"


class Codec:
    """Copies worlds and gives them keys, by explicit shapes: a general deep copy would be twenty times slower.

    shapes: for each class the fields that change in place. ignored: names of fields that follow from others or do not count.
    """

    def __init__(self, shapes: Mapping[type, Mapping[str, Shape]], ignored: Iterable[str]) -> None:
        self._shapes = shapes
        self._ignored = frozenset(ignored)
        self._plans: dict[type, list[tuple[str, Shape]]] = {}
        self._compared: dict[type, list[tuple[str, Shape | None]]] = {}

    def clone(self, world: WorldT) -> WorldT:
        """A copy that shares nothing that can change."""
        copy: WorldT = self._clone(world, {})
        return copy

    def _clone(self, value: Any, memo: dict[int, Any]) -> Any:
        known = memo.get(id(value))
        if known is not None:
            return known
        kind = type(value)
        copy = memo[id(value)] = object.__new__(kind)
        if hasattr(value, "__dict__"):
            copy.__dict__.update(value.__dict__)
        else:
            for name in kind.__slots__:
                setattr(copy, name, getattr(value, name))
        for name, shape in self._plan(kind):
            setattr(copy, name, self._clone_field(getattr(value, name), shape, memo))
        return copy

    def _clone_field(self, item: Any, shape: Shape, memo: dict[int, Any]) -> Any:
        if shape is Shape.FLAT:
            return item.copy()
        if shape is Shape.SETS or shape is Shape.LISTS:
            return [one.copy() for one in item]
        if shape is Shape.DICT_OF_SETS:
            return {key: one.copy() for key, one in item.items()}
        if shape is Shape.OBJECT:
            return self._clone(item, memo)
        if shape is Shape.LIST_OF_OBJECTS:
            return [self._clone(one, memo) for one in item]
        return {key: self._clone(one, memo) for key, one in item.items()}

    def _plan(self, kind: type) -> list[tuple[str, Shape]]:
        """Shapes of this class, own or inherited."""
        if kind not in self._plans:
            base = next(one for one in kind.__mro__ if one in self._shapes)
            self._plans[kind] = list(self._shapes[base].items())
        return self._plans[kind]

    def key(self, world: object) -> int:
        """Equal for worlds that differ in nothing that counts; 64 bits, so two of a million others meet with probability 1e-7."""
        return hash(self._key(world, {}))

    def _key(self, value: Any, seen: dict[int, int]) -> Hashable:
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        kind = type(value)
        if kind not in self._compared:
            names = value.__dict__ if hasattr(value, "__dict__") else kind.__slots__
            shapes = dict(self._plan(kind))
            self._compared[kind] = [(name, shapes.get(name)) for name in names if name not in self._ignored]
        return tuple([self._key_field(getattr(value, name), shape, seen) for name, shape in self._compared[kind]])

    def _key_field(self, item: Any, shape: Shape | None, seen: dict[int, int]) -> Hashable:
        if shape is None:
            result: Hashable = item
            return result
        if shape is Shape.FLAT:
            kind = type(item)
            return frozenset(item) if kind is set else frozenset(item.items()) if kind is dict else tuple(item)
        if shape is Shape.SETS:
            return tuple([frozenset(one) for one in item])
        if shape is Shape.LISTS:
            return tuple([tuple(one) for one in item])
        if shape is Shape.DICT_OF_SETS:
            return frozenset([(key, frozenset(one)) for key, one in item.items()])
        if shape is Shape.OBJECT:
            return self._key(item, seen)
        if shape is Shape.LIST_OF_OBJECTS:
            return tuple([self._key(one, seen) for one in item])
        return tuple([(key, self._key(item[key], seen)) for key in sorted(item)])

    def check_shapes(self, world: object) -> None:
        """Raise AssertionError when a field changes in place and no shape says so: copies would share it."""
        work, seen = [world], set()
        while work:
            value = work.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            shapes = dict(self._plan(type(value)))
            for name in value.__dict__ if hasattr(value, "__dict__") else type(value).__slots__:
                item, shape = getattr(value, name), shapes.get(name)
                if shape is None:
                    hash(item)
                    assert type(item) not in self._shapes, f"{type(value).__name__}.{name} is an object without a shape"
                elif shape is Shape.OBJECT:
                    work.append(item)
                elif shape is Shape.LIST_OF_OBJECTS:
                    work += item
                elif shape is Shape.DICT_OF_OBJECTS:
                    work += item.values()


# -- exploration -------------------------------------------------------------------------------------------------------


class Explorer(Generic[WorldT]):
    """One exploration: all states from `start` on by moves of kind `worst` or better."""

    def __init__(
        self,
        codec: Codec,
        moves: Callable[[WorldT], Iterable[Move]],
        tidy: Callable[[WorldT], None],
        check: Callable[[WorldT], None],
        progress: tuple[CanReach[WorldT], ...],
        worst: int = DAMAGE,
        limit: int = 1_000_000,
    ) -> None:
        """tidy: drops, after each move, what cannot matter any more. check: raises Violation, for each new state."""
        self._codec = codec
        self._moves = moves
        self._tidy = tidy
        self._check = check
        self._progress = progress
        self._worst = worst
        self._limit = limit
        self._number: dict[int, int] = {}
        self._parents = array("i")
        self._labels: list[str] = []
        self._flags = [(bytearray(), bytearray()) for _ in progress]
        self._edges = array("I"), array("I"), bytearray()

    def run(self, start: WorldT) -> Result:
        """Explore. Raises MemoryError beyond the limit."""
        self._codec.check_shapes(start)
        self._add(start, -1, "")
        frontier = [(0, start)]
        while frontier:
            reached: list[tuple[int, WorldT]] = []
            for number, world in frontier:
                violation = self._expand(number, world, reached)
                if violation is not None:
                    return violation
            frontier = reached
        if self._worst == DAMAGE:
            for index, progress in enumerate(self._progress):
                stuck = self._first_stuck(index, progress.worst)
                if stuck is not None:
                    return self._result(progress.name, self._path(stuck))
        return self._result("", ())

    def _expand(self, number: int, world: WorldT, reached: list[tuple[int, WorldT]]) -> Result | None:
        sources, targets, kinds = self._edges
        for move in self._moves(world):
            if move.kind > self._worst:
                continue
            after = self._codec.clone(world)
            try:
                move.apply(after)
                self._tidy(after)
                key = self._codec.key(after)
                target = self._number.get(key)
                if target is None:
                    self._check(after)
            except (Violation, AssertionError, RuntimeError) as finding:
                return self._result(f"{type(finding).__name__}: {finding}", (*self._path(number), move.label))
            if target is None:
                target = self._add(after, number, move.label, key)
                reached.append((target, after))
            sources.append(number)
            targets.append(target)
            kinds.append(move.kind)
        return None

    def _add(self, world: WorldT, parent: int, label: str, key: int | None = None) -> int:
        number = len(self._labels)
        if number == self._limit:
            raise MemoryError(f"more than {self._limit} states")
        self._number[self._codec.key(world) if key is None else key] = number
        self._parents.append(parent)
        self._labels.append(label)
        for (applies, goal), progress in zip(self._flags, self._progress, strict=True):
            applies.append(progress.applies(world))
            goal.append(progress.goal(world))
        return number

    def _first_stuck(self, index: int, worst: int) -> int | None:
        """The earliest state that applies and cannot reach the goal, or None."""
        applies, goal = self._flags[index]
        sources, targets, kinds = self._edges
        incoming: dict[int, list[int]] = {}
        for source, target, kind in zip(sources, targets, kinds, strict=True):
            if kind <= worst:
                incoming.setdefault(target, []).append(source)
        good = bytearray(goal)
        work = [number for number, is_goal in enumerate(good) if is_goal]
        while work:
            for source in incoming.get(work.pop(), ()):
                if not good[source]:
                    good[source] = 1
                    work.append(source)
        return next((number for number, is_good in enumerate(good) if not is_good and applies[number]), None)

    def _path(self, number: int) -> tuple[str, ...]:
        steps = []
        while self._parents[number] >= 0:
            steps.append(self._labels[number])
            number = self._parents[number]
        return tuple(reversed(steps))

    def _result(self, violation: str, path: tuple[str, ...]) -> Result:
        return Result(len(self._labels), len(self._edges[0]), violation, path)
