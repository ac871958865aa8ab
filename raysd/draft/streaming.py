"""The train stage of a stream (`capture.mode: stream`): the draft learns from states that the target hands out meanwhile, and that no disk holds."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import ServedAcceptance
from raysd.draft.learn import learn, new_learner
from raysd.draft.schedule import epoch_order
from raysd.draft.source import ReadAhead, dealt
from raysd.draft.train import Deals, LearnOnWorkers, check_enough, draft_vocabulary, finish, warn_of_poor_vocabulary
from raysd.draft.unfinished import Desk, StageDesk
from raysd.draft.workers import Alone
from raysd.experiment import Experiment
from raysd.experiment.train import TrainSection
from raysd.hidden_states.capture import Questions, Request
from raysd.hidden_states.queue import MostBytes, check_queue, most_bytes, state_bytes
from raysd.hidden_states.shards import Conversation
from raysd.hidden_states.verify import check_conversation


class Group(NamedTuple):
    """Prompts that are asked together."""

    epoch: int
    indices: Sequence[int]


States = Callable[[], torch.Tensor]
"""States that lie in a stream: the call fetches them, the target's dtype [T, L, H], to whichever process this object has come to. They keep their place in the
stream for as long as the stage's process holds the object."""


class Arrival(NamedTuple):
    """An Answer of a stream."""

    index: int
    token_ids: list[int]
    finish_reason: str
    states: States


class StreamEngine(Protocol):
    """A running target that hands out its hidden states, as fast as they are taken."""

    def answers(self, groups: Iterable[Sequence[Request]]) -> Iterator[Arrival]:
        """As a CaptureEngine's, but group after group: the last answer of one comes before the first of the next. There may be groups without end: one is
        taken from them when those before have been asked.
        """

    def put(self, states_TLH: torch.Tensor) -> States:
        """Has states lie in the stream as those of an answer do."""


@dataclass(frozen=True)
class Held:
    """States that have been fetched already."""

    states_TLH: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.states_TLH


@dataclass(frozen=True)
class Streamed:
    """A conversation of which all is known but its states."""

    stateless: Conversation
    """Its states are [0, L, H], of the target's dtype."""
    states: States

    def whole(self) -> Conversation:
        """With its states, checked. Raises StageError for states that cannot be right."""
        conversation = dataclasses.replace(self.stateless, states_TLH=self.states())
        check_conversation(conversation, *self.stateless.states_TLH.shape[1:])
        return conversation


StreamFactory = Callable[[Experiment, list[int], MostBytes], AbstractContextManager[StreamEngine]]
"""`with factory(experiment, layer_ids, most_bytes) as engine:`"""


def train_on_stream(run: StageRun, served_acceptance: ServedAcceptance, stream_factory: StreamFactory, learn_on_workers: LearnOnWorkers,
                    clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Captures and trains; writes what `train` does.

    The choose split is answered first and held in memory, by each of several workers, too. Then come the train split's prompts, shuffled once per epoch, in groups of
    `capture.shard_conversations`, and each step takes the next answers in the order of the prompts. The draft's vocabulary is counted from the answers of
    the first group alone, since the first step needs it: a group that is too small for that is warned of, by what its tokens cover of the choose split.
    Several workers take the states of their shares out of the stream themselves; those of the choose split they get from this process.
    Goes on from the last checkpoint of an attempt before: the choose split and the group that holds the next step are answered again. So it is, too, when one
    of several workers dies: what the others have taken from the stream does not come again, and the attempt ends with TryAgainError.
    Metrics: those of `train`, with conversations and dropped counted anew in every epoch, up to the last step; `capture`: of this attempt conversations,
    prompt_tokens, output_tokens, truncated, bytes (of states that were handed over, none of them on disk), elapsed_s (of answering, with the waits for
    training) and output_tok_s; layer_ids and what `capture` says of the first conversation. Raises what `train` and `capture` raise.
    """
    section, questions = run.experiment.train, Questions(run)
    split = [prompt.split for prompt in questions.prompts]
    train, choose = split.count("train"), split.count("choose")  # the train split's are the first
    where = run.experiment.prompts.path
    check_enough(train, 0, choose, run.experiment, where)
    desk = StageDesk(run)
    newest = desk.newest()
    place = Place() if newest is None else Place(**newest["place"])
    size = run.experiment.capture.shard_conversations
    choose_groups = [Group(0, range(start, min(start + size, len(split)))) for start in range(train, len(split), size)]
    groups = itertools.chain(choose_groups, prompt_groups(train, size, section.seed, place.group))
    run.progress("starting vLLM")
    lengths = list(map(len, questions.rendered))
    most = most_bytes(run.experiment, lengths[:train], lengths[train:], len(questions.layer_ids), questions.shape.hidden_size)
    check_queue(run.experiment, most)
    with stream_factory(run.experiment, questions.layer_ids, most) as engine:
        ordered = OrderedAnswers(engine, run.experiment, questions, groups, clock)
        held = []
        for _ in choose_groups:
            for conversation in map(Streamed.whole, ordered.next_group()):
                questions.check_first(conversation)
                held += [conversation] if _has_answer(conversation) else []
                run.progress("answering the choose split", ordered.figures["conversations"], choose, "conversations")
        check_enough(train, 0, len(held), run.experiment, where)
        answers = [each.token_ids[each.prompt_tokens:] for each in held]
        arriving = iter(ordered.next_group, None)
        if newest is None:
            run.progress("answering the first prompts")
            first = deque(ordered.next_group())
            vocabulary = _count_vocabulary(run.experiment, questions, first, answers)
            arriving = itertools.chain([_emptied(first)], arriving)
        else:
            vocabulary = newest["vocabulary"]
        taken = learnable(arriving, place, per_epoch=-(-train // size), truncated=section.truncated == "keep",
                          enough=lambda conversations, dropped: check_enough(conversations, dropped, len(held), run.experiment, where))
        steps = Steps(taken, section, 0 if newest is None else newest["training"]["steps"], place)
        placed = _PlacedDesk(desk, steps, vocabulary)
        workers = Alone(torch.device("cuda" if torch.cuda.is_available() and section.workers == 1 else "cpu"))
        learner = new_learner(run.experiment, questions.target, vocabulary, workers)
        if section.workers == 1:
            with StreamedSource(steps, section) as source:
                training = learn(section, learner, source, held, workers, placed, run.whole, clock)
        else:
            training = learn_on_workers(run, questions.target, vocabulary, placed, Deals(len(held), deals(held, steps, section.workers, engine)))
        reached = steps.place(training.steps)
    return finish(run, learner, training, answers, served_acceptance) | {
        "conversations": training.steps * section.conversations_per_step, "dropped": reached.dropped,
        "capture": ordered.metrics() | {"layer_ids": questions.layer_ids, **(questions.checks or {})}}


def _count_vocabulary(experiment: Experiment, questions: Questions, first: Collection[Streamed], choose_answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The draft's vocabulary, int64, ascending; warns if the first group is too small to count it from."""
    said = [each.stateless for each in first]
    vocabulary = draft_vocabulary(experiment, questions.target, (each.token_ids[each.prompt_tokens:] for each in said))
    warn_of_poor_vocabulary(vocabulary, len(first), choose_answers, "capture.shard_conversations or draft.vocab_size")
    return vocabulary


def _emptied(group: deque[Streamed]) -> Iterator[Streamed]:
    """What is in it. It holds nothing that it has given: states are to go when the steps have taken them."""
    while group:
        yield group.popleft()


def prompt_groups(count: int, size: int, seed: int, first: int) -> Iterator[Group]:
    """Groups of `size` of `count` prompts: epochs without end, each shuffled by its own seed and cut into groups. From group `first` on, counted
    over all epochs. A group holds prompts of one epoch, so that its last one may be smaller.
    """
    per_epoch = -(-count // size)
    for epoch in itertools.count(first // per_epoch):
        order = epoch_order(count, epoch, seed)
        for start in range(first % per_epoch * size if epoch == first // per_epoch else 0, count, size):
            yield Group(epoch, order[start:start + size])


class OrderedAnswers:
    """Conversations in the order of the prompts, from answers in the order in which they finish; holds back at most a group.

    For one worker, the stage's own process, states are taken out of the stream when they arrive: its queue may be smaller than a group then. For several
    they stay there until a worker takes them.
    """

    def __init__(self, engine: StreamEngine, experiment: Experiment, questions: Questions, groups: Iterable[Group], clock: Callable[[], float]) -> None:
        """groups: of `questions.prompts`."""
        asked, self._groups = itertools.tee(groups)
        self._answers = engine.answers([questions.request(index, group.epoch) for index in group.indices] for group in asked)
        self._questions, self._clock, self._before = questions, clock, 0
        self._at_once = experiment.train.workers == 1
        self._no_states = torch.empty(0, len(questions.layer_ids), questions.shape.hidden_size, dtype=getattr(torch, experiment.target.dtype))
        self._state_bytes = state_bytes(experiment, len(questions.layer_ids), questions.shape.hidden_size)
        self._started_s = clock()
        self._elapsed_s = 0.0
        self.figures = dict.fromkeys(("conversations", "prompt_tokens", "output_tokens", "truncated", "bytes"), 0)
        """Of all answers so far."""

    def next_group(self) -> Iterator[Streamed]:
        """The next group's conversations. To be taken to its end before the one after it."""
        group, before, waiting = next(self._groups).indices, self._before, {}
        self._before += len(group)
        for position, _ in enumerate(group):
            while position not in waiting:
                self._hear(next(self._answers), group, before, waiting)
            yield waiting.pop(position)

    def _hear(self, arrival: Arrival, group: Sequence[int], before: int, waiting: dict[int, Streamed]) -> None:
        """Puts an answer among those that wait. A function of its own: no variable of it outlives it, so that its states give up their place."""
        position = arrival.index - before
        said = self._questions.said(group[position], arrival.token_ids, arrival.finish_reason, self._no_states)
        waiting[position] = Streamed(said, Held(arrival.states()) if self._at_once else arrival.states)
        self._count(said)

    def _count(self, conversation: Conversation) -> None:
        self._elapsed_s = self._clock() - self._started_s
        figures = self.figures
        figures["conversations"] += 1
        figures["prompt_tokens"] += conversation.prompt_tokens
        figures["output_tokens"] += len(conversation.token_ids) - conversation.prompt_tokens
        figures["truncated"] += conversation.finish_reason == "length"
        figures["bytes"] += (len(conversation.token_ids) - 1) * self._state_bytes

    def metrics(self) -> dict[str, Any]:
        return {**self.figures, "elapsed_s": self._elapsed_s, "output_tok_s": self.figures["output_tokens"] / self._elapsed_s}


@dataclass(frozen=True)
class Place:
    """Where in the train split's stream a step starts."""

    group: int = 0
    """Counted over all epochs."""
    taken: int = 0
    """How many of the group's conversations steps before it have taken."""
    dropped: int = 0
    """Answers that were passed over before it, since nothing can be learned from them."""


def learnable(groups: Iterable[Iterable[Streamed]], place: Place, per_epoch: int, truncated: bool,
              enough: Callable[[int, int], None]) -> Iterator[tuple[Streamed, Place]]:
    """The conversations from a place on that can be learned from, each with the place after it. groups: from the place's own on.

    per_epoch: groups in an epoch. truncated: whether to learn from answers that were cut off. enough: called at the end of an epoch that was seen whole
    with the conversations it had and those that were passed over; raises if it is no use to go on.
    """
    dropped, in_epoch = place.dropped, None
    for number, group in enumerate(groups, start=place.group):
        if number % per_epoch == 0:
            in_epoch = [0, 0]
        taken = 0
        for streamed in group:
            fresh = number > place.group or taken >= place.taken  # the others an attempt before has had
            good = _has_answer(streamed.stateless) and (truncated or streamed.stateless.finish_reason != "length")
            if in_epoch is not None:
                in_epoch[not good] += 1
            taken += good
            dropped += fresh and not good
            if fresh and good:
                yield streamed, Place(number, taken, dropped)
        if in_epoch is not None and (number + 1) % per_epoch == 0:
            enough(*in_epoch)


def _has_answer(conversation: Conversation) -> bool:
    """Whether there is something in it that a draft could propose: an answer of two tokens, as in `Captured`."""
    return len(conversation.token_ids) - conversation.prompt_tokens >= 2


class Steps:
    """Takes the conversations of one step after the other off a stream, and knows where each step starts. One thread takes, another may ask for places."""

    def __init__(self, taken: Iterator[tuple[Streamed, Place]], section: TrainSection, step: int, place: Place) -> None:
        """step: the one that starts at the place, 0-based, which is the first that is taken."""
        self._taken, self._next, self._steps, self._per_step = taken, step, section.steps, section.conversations_per_step
        self._places = {step: place}

    def left(self) -> int:
        """How many steps there are to take."""
        return self._steps - self._next

    def take(self) -> list[Streamed]:
        """The next step's."""
        found = list(itertools.islice(self._taken, self._per_step))
        self._next += 1
        self._places[self._next] = found[-1][1]
        return [streamed for streamed, _ in found]

    def place(self, step: int) -> Place:
        """Where a step starts that has been taken, or is the next one. Those before it are forgotten."""
        for before in [number for number in list(self._places) if number < step]:
            del self._places[before]
        return self._places[step]


class StreamedSource(ReadAhead):
    """Conversations off a stream (a Source of one worker)."""

    def __init__(self, steps: Steps, section: TrainSection) -> None:
        super().__init__(section.steps)
        self._stream = steps

    def _read(self, number: int) -> list[Conversation]:
        return [each.whole() for each in self._stream.take()]


def deals(choose: Sequence[Conversation], steps: Steps, workers: int, engine: StreamEngine) -> Iterator[list[list[Streamed]]]:
    """What each of several workers gets: first the choose split, a conversation at a time, all of them the same; then step after step, each its share of it."""
    for conversation in choose:
        stateless = dataclasses.replace(conversation, states_TLH=conversation.states_TLH[:0].clone())
        yield [[Streamed(stateless, engine.put(conversation.states_TLH))]] * workers
    while steps.left():
        yield _shares(steps.take(), workers)


def _shares(step: list[Streamed], workers: int) -> list[list[Streamed]]:
    return [[step[i] for i in share] for share in dealt([len(each.stateless.token_ids) for each in step], workers)]


class _PlacedDesk:
    """A desk whose checkpoints also hold what a later attempt needs of the stream."""

    def __init__(self, desk: Desk, steps: Steps, vocabulary: torch.Tensor) -> None:
        self._desk, self._steps, self._vocabulary = desk, steps, vocabulary
        self.progress, self.note, self.newest = desk.progress, desk.note, desk.newest

    def keep(self, document: dict[str, Any]) -> None:
        place = self._steps.place(document["training"]["steps"])
        self._desk.keep({**document, "place": dataclasses.asdict(place), "vocabulary": self._vocabulary})
