"""The drafts of one request, and how many of them were right."""

from collections.abc import Sequence
from typing import NamedTuple

from ropewalk.model_runtime.scheduling.drafts.ngram_index import NgramIndex

_LONG_MATCH = 6  # tokens: shorter matches are often chance
_SHORT, _LONG, _PREDICTED, _FORCED = range(4)  # sources; each has a rate of its own
_FIRST_RATES = (0.5, 0.8, 0.8, 0.95)  # before anything is verified
_WEIGHT = 4.0  # verified tokens that count as much as the first rate
_DECAY = 0.9  # of older verified tokens, for each draft
_RECOVERY = 0.01  # of the way back to the first rate, for each draft that is proposed
_MOST_MISSES = 3  # drafts without a right token, after which there is a pause
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 256  # tokens


class Draft(NamedTuple):
    """Tokens that may come next."""

    token_ids: Sequence[int]
    rate: float  # the chance that a token is right if those before it are
    source: int


NO_DRAFT = Draft((), 0.0, _SHORT)


class _Pause:
    """When drafts are proposed again, after some without a right token."""

    def __init__(self) -> None:
        self.begins = 0  # no draft before so many known tokens
        self._length = _FIRST_PAUSE
        self._num_misses = 0

    def note(self, num_accepted: int, num_known: int) -> None:
        """Record a verified draft. Pauses double until a draft has a right token."""
        if num_accepted:
            self._num_misses, self._length = 0, _FIRST_PAUSE
            return
        self._num_misses += 1
        if self._num_misses >= _MOST_MISSES:
            self.begins = num_known + self._length
            self._length = min(2 * self._length, _LONGEST_PAUSE)


class Drafter:
    """The source of one request's drafts. Only the engine's thread may use it."""

    def __init__(self, prediction_ids: Sequence[int] = ()) -> None:
        """Take the tokens that the client predicts, if it does."""
        self._num_drafted = self._num_accepted = 0  # tokens
        self._awaited: Sequence[int] = ()  # tokens of the step's draft, which is right so far
        self.num_right = 0  # tokens of the step's draft that were chosen
        self._own, self._predicted = NgramIndex(), NgramIndex()
        self._prediction_ids = prediction_ids
        self._num_followed = 0  # tokens of the answer that the prediction begins with
        self._right = [_WEIGHT * rate for rate in _FIRST_RATES]
        self._tried = [_WEIGHT] * len(_FIRST_RATES)
        self._pause, self._forced_pause = _Pause(), _Pause()

    @property
    def counts(self) -> tuple[int, int]:
        """Return the tokens of drafts that were chosen, and those that were not."""
        return self._num_accepted, self._num_drafted - self._num_accepted

    def computed(self, token_ids: Sequence[int]) -> None:
        """Record that a step has computed these tokens of a draft."""
        self._num_drafted += len(token_ids)
        self._awaited, self.num_right = token_ids, 0

    def chosen(self, token_id: int) -> None:
        """Record a token of the answer, before the answer is delivered."""
        if self._awaited and self._awaited[0] == token_id:
            self._num_accepted += 1
            self.num_right += 1
            self._awaited = self._awaited[1:]
        else:
            self._awaited = ()

    def propose(
        self,
        token_ids: Sequence[int],
        num_prompt: int,
        most: int,
        forced_ids: Sequence[int] = (),
    ) -> Draft:
        """Return a draft of at most `most` tokens behind the known ones: prompt, then answer.

        `forced_ids`: tokens that a grammar leaves no choice about.
        """
        num_known = len(token_ids)
        if forced_ids and num_known >= self._forced_pause.begins:
            return self._draft(forced_ids[:most], _FORCED)
        is_indexed = self._own.follow(token_ids)
        is_indexed = self._predicted.follow(self._prediction_ids) and is_indexed
        if num_known < self._pause.begins:
            return NO_DRAFT
        if self._follows_prediction(token_ids, num_prompt):
            at = self._num_followed
            return self._draft(self._prediction_ids[at : at + most], _PREDICTED)
        return self._matched(token_ids, most) if is_indexed else NO_DRAFT

    def _matched(self, token_ids: Sequence[int], most: int) -> Draft:
        """Return the tokens behind the longest match of the text's end."""
        at, length = self._predicted.find(self._prediction_ids, token_ids)
        own_at, own_length = self._own.find(token_ids, token_ids)
        if length and length >= own_length:
            return self._draft(self._prediction_ids[at : at + most], _source(length))
        if not own_length:
            return NO_DRAFT
        # A match that ends at the end of the text is a period, which goes on.
        period = len(token_ids) - own_at
        repeated = [token_ids[own_at + place % period] for place in range(most)]
        return self._draft(repeated, _source(own_length))

    def verified(self, draft: Draft, num_drafted: int, num_accepted: int, num_known: int) -> None:
        """Record the first tokens of a draft that a step computed, and those that were chosen.

        `num_known`: the tokens after that step. After some drafts without a right token there is a
        pause. Forced tokens have a pause of their own.
        """
        source = draft.source
        # The first wrong token was tried, and those behind it were not.
        num_tried = min(num_accepted + 1, num_drafted)
        self._right[source] = _DECAY * self._right[source] + num_accepted
        self._tried[source] = _DECAY * self._tried[source] + num_tried
        pause = self._forced_pause if source == _FORCED else self._pause
        pause.note(num_accepted, num_known)

    def _draft(self, token_ids: Sequence[int], source: int) -> Draft:
        # A rate that is too low to be tried would otherwise never rise again.
        first = _WEIGHT * _FIRST_RATES[source]
        self._right[source] += _RECOVERY * (first - self._right[source])
        self._tried[source] += _RECOVERY * (_WEIGHT - self._tried[source])
        return Draft(token_ids, self._right[source] / self._tried[source], source)

    def _follows_prediction(self, token_ids: Sequence[int], num_prompt: int) -> bool:
        """Return whether the whole answer so far is the beginning of the prediction."""
        num_generated = len(token_ids) - num_prompt
        prediction_ids = self._prediction_ids
        while self._num_followed < num_generated:
            at = self._num_followed
            if at >= len(prediction_ids) or prediction_ids[at] != token_ids[num_prompt + at]:
                return False
            self._num_followed += 1
        return self._num_followed < len(prediction_ids)


def _source(match_length: int) -> int:
    return _LONG if match_length >= _LONG_MATCH else _SHORT
