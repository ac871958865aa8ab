"""The train stage of a stream (`capture.mode: stream`): the draft learns from states that the target hands out meanwhile, and that no disk holds."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import ServedAcceptance
from raysd.draft.learn import learn, new_learner
from raysd.draft.schedule import epoch_order
from raysd.draft.shape import check_trainable
from raysd.draft.train import check_enough, draft_vocabulary, finish, warn_of_poor_vocabulary
from raysd.draft.unfinished import Desk, StageDesk
from raysd.draft.workers import Alone
from raysd.experiment import Experiment
from raysd.experiment.train import TrainSection
from raysd.hidden_states.capture import Answer, Questions, Request
from raysd.hidden_states.shards import Conversation


@dataclass(frozen=True)
class MostBytes:
    """The most that the hidden states of an experiment can take."""

    conversation: int
    group: int


class Group(NamedTuple):
    """Prompts that are asked together."""

    epoch: int
    indices: Sequence[int]


class StreamEngine(Protocol):
    """A running target that hands out its hidden states, as fast as they are taken."""

    def answers(self, groups: Iterable[Sequence[Request]]) -> Iterator[Answer]:
        """As a CaptureEngine's, but group after group: the last answer of one comes before the first of the next. There may be groups without end: one is
        taken from them when those before have been asked.
        """


StreamFactory = Callable[[Experiment, list[int], MostBytes], AbstractContextManager[StreamEngine]]
"""`with factory(experiment, layer_ids, most_bytes) as engine:`"""


def train_on_stream(run: StageRun, served_acceptance: ServedAcceptance, stream_factory: StreamFactory,
                    clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Captures and trains; writes what `train` does.

    The choose split is answered first and held in memory. Then come the train split's prompts, shuffled once per epoch, in groups of
    `capture.shard_conversations`, and each step takes the next answers in the order of the prompts. The draft's vocabulary is counted from the answers of
    the first group alone, since the first step needs it: a group that is too small for that is warned of, by what its tokens cover of the choose split.
    Goes on from the last checkpoint of an attempt before: the choose split and the group that holds the next step are answered again.
    Metrics: those of `train`, with conversations and dropped counted anew in every epoch, up to the last step; `capture`: of this attempt conversations,
    prompt_tokens, output_tokens, truncated, bytes (of states that were handed over, none of them on disk), elapsed_s (of answering, with the waits for
    training) and output_tok_s; layer_ids and what `capture` says of the first conversation. Raises what `train` and `capture` raise.
    """
    section, questions = run.experiment.train, Questions(run)
    check_trainable(run.experiment.draft, questions.target)
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
    with stream_factory(run.experiment, questions.layer_ids, most_bytes(run.experiment, questions)) as engine:
        ordered = OrderedAnswers(engine, questions, groups, clock)
        held = []
        for _ in choose_groups:
            for conversation in ordered.next_group():
                held += [conversation] if _has_answer(conversation) else []
                run.progress("answering the choose split", ordered.figures["conversations"], choose, "conversations")
        check_enough(train, 0, len(held), run.experiment, where)
        answers = [each.token_ids[each.prompt_tokens:] for each in held]
        arriving = iter(ordered.next_group, None)
        if newest is None:
            run.progress("answering the first prompts")
            first = list(ordered.next_group())
            vocabulary = _count_vocabulary(run.experiment, questions, first, answers)
            arriving = itertools.chain(iter([first]), arriving)
            del first  # its states are to go when the steps have taken them
        else:
            vocabulary = newest["vocabulary"]
        taken = learnable(arriving, place, per_epoch=-(-train // size), truncated=section.truncated == "keep",
                          enough=lambda conversations, dropped: check_enough(conversations, dropped, len(held), run.experiment, where))
        workers = Alone(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        learner = new_learner(run.experiment, questions.target, vocabulary, workers)
        with StreamedSource(taken, section, 0 if newest is None else newest["training"]["steps"], place) as source:
            training = learn(section, learner, source, held, workers, _PlacedDesk(desk, source, vocabulary), run.whole, clock)
            reached = source.place(training.steps)
    return finish(run, learner, training, answers, served_acceptance) | {
        "conversations": training.steps * section.conversations_per_step, "dropped": reached.dropped,
        "capture": ordered.metrics() | {"layer_ids": questions.layer_ids, **(questions.checks or {})}}


def _count_vocabulary(experiment: Experiment, questions: Questions, first: Sequence[Conversation], choose_answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The draft's vocabulary, int64, ascending; warns if the first group is too small to count it from."""
    vocabulary = draft_vocabulary(experiment, questions.target, (each.token_ids[each.prompt_tokens:] for each in first))
    warn_of_poor_vocabulary(vocabulary, len(first), choose_answers, "capture.shard_conversations or draft.vocab_size")
    return vocabulary


def most_bytes(experiment: Experiment, questions: Questions) -> MostBytes:
    """What the longest prompts come to, each with the longest answer."""
    capture, shape = experiment.capture, questions.shape
    longest = sorted(map(len, questions.rendered), reverse=True)[:capture.shard_conversations]
    token_bytes = len(questions.layer_ids) * shape.hidden_size * getattr(torch, experiment.target.dtype).itemsize
    return MostBytes((longest[0] + capture.max_tokens) * token_bytes, (sum(longest) + len(longest) * capture.max_tokens) * token_bytes)


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
    """Conversations in the order of the prompts, from answers in the order in which they finish; holds back at most a group."""

    def __init__(self, engine: StreamEngine, questions: Questions, groups: Iterable[Group], clock: Callable[[], float]) -> None:
        """groups: of `questions.prompts`."""
        asked, self._groups = itertools.tee(groups)
        self._answers = engine.answers([questions.request(index, group.epoch) for index in group.indices] for group in asked)
        self._questions, self._clock, self._before = questions, clock, 0
        self._started_s = clock()
        self._elapsed_s = 0.0
        self.figures = dict.fromkeys(("conversations", "prompt_tokens", "output_tokens", "truncated", "bytes"), 0)
        """Of all answers so far."""

    def next_group(self) -> Iterator[Conversation]:
        """The next group's conversations. To be taken to its end before the one after it."""
        group, before, waiting = next(self._groups).indices, self._before, {}
        self._before += len(group)
        for position, _ in enumerate(group):
            while position not in waiting:
                answer = next(self._answers)
                waiting[answer.index - before] = conversation = self._questions.conversation(group[answer.index - before], answer)
                self._count(conversation)
            yield waiting.pop(position)

    def _count(self, conversation: Conversation) -> None:
        self._elapsed_s = self._clock() - self._started_s
        figures = self.figures
        figures["conversations"] += 1
        figures["prompt_tokens"] += conversation.prompt_tokens
        figures["output_tokens"] += len(conversation.token_ids) - conversation.prompt_tokens
        figures["truncated"] += conversation.finish_reason == "length"
        figures["bytes"] += conversation.states_TLH.nbytes

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


def learnable(groups: Iterable[Iterable[Conversation]], place: Place, per_epoch: int, truncated: bool,
              enough: Callable[[int, int], None]) -> Iterator[tuple[Conversation, Place]]:
    """The conversations from a place on that can be learned from, each with the place after it. groups: from the place's own on.

    per_epoch: groups in an epoch. truncated: whether to learn from answers that were cut off. enough: called at the end of an epoch that was seen whole
    with the conversations it had and those that were passed over; raises if it is no use to go on.
    """
    dropped, in_epoch = place.dropped, None
    for number, group in enumerate(groups, start=place.group):
        if number % per_epoch == 0:
            in_epoch = [0, 0]
        taken = 0
        for conversation in group:
            fresh = number > place.group or taken >= place.taken  # the others an attempt before has had
            good = _has_answer(conversation) and (truncated or conversation.finish_reason != "length")
            if in_epoch is not None:
                in_epoch[not good] += 1
            taken += good
            dropped += fresh and not good
            if fresh and good:
                yield conversation, Place(number, taken, dropped)
        if in_epoch is not None and (number + 1) % per_epoch == 0:
            enough(*in_epoch)


def _has_answer(conversation: Conversation) -> bool:
    """Whether there is something in it that a draft could propose: an answer of two tokens, as in `Captured`."""
    return len(conversation.token_ids) - conversation.prompt_tokens >= 2


class StreamedSource:
    """Takes conversations off a stream: those of one step, and of the next while this one is computed (a Source of one worker)."""

    def __init__(self, taken: Iterator[tuple[Conversation, Place]], section: TrainSection, step: int, place: Place) -> None:
        """step: the one that starts at the place, 0-based, which is the first that may be asked for."""
        self._taken, self._steps, self._per_step = taken, section.steps, section.conversations_per_step
        self._places = {step: place}
        self._reader = ThreadPoolExecutor(1)
        self._ahead: Future[list[tuple[Conversation, Place]]] | None = None

    def __enter__(self) -> StreamedSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)  # it may wait for an answer, and the engine's end ends that

    def step(self, number: int) -> list[Conversation]:
        """The conversations of a step."""
        found = self._ahead.result() if self._ahead is not None else self._take()
        self._ahead = self._reader.submit(self._take) if number + 1 < self._steps else None
        self._places = {number: self._places[number], number + 1: found[-1][1]}
        return [conversation for conversation, _ in found]

    def place(self, step: int) -> Place:
        """Where a step starts: the last one that was asked for, or the one after it."""
        return self._places[step]

    def _take(self) -> list[tuple[Conversation, Place]]:
        return list(itertools.islice(self._taken, self._per_step))


class _PlacedDesk:
    """A desk whose checkpoints also hold what a later attempt needs of the stream."""

    def __init__(self, desk: Desk, source: StreamedSource, vocabulary: torch.Tensor) -> None:
        self._desk, self._source, self._vocabulary = desk, source, vocabulary
        self.progress, self.note, self.newest = desk.progress, desk.note, desk.newest

    def keep(self, document: dict[str, Any]) -> None:
        place = self._source.place(document["training"]["steps"])
        self._desk.keep({**document, "place": dataclasses.asdict(place), "vocabulary": self._vocabulary})
