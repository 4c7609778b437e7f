"""Two mistakes in when a page is read quantised: each follows the chunks of a prompt."""

from typing import Any

import numpy as np

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.quantised.cpu_backend import QuantisedCpuAttention


class ReadAtTheWrite(QuantisedCpuAttention):
    """A mistake: a page that is full is read quantised, by its own tokens, too."""

    def take_pages(self, batch: Batch) -> None:
        super().take_pages(batch)
        self._page_T = batch.page_T.numpy()

    def _kernel(self, pages: Any) -> Any:
        kernel, (*plain, own_T, sides), *sizes = super()._kernel(pages)
        is_staged_T = own_T % 2 == 0
        return kernel, (*plain, np.where(is_staged_T, self._page_T, own_T), sides), *sizes


class ReadAfterTheStep(QuantisedCpuAttention):
    """A mistake: a page is read quantised by later steps only."""

    def attend(self, *arguments: Any) -> Any:
        """Read the pages that this step fills as they were written."""
        table_SN, *others = plain = self._plain_sequences
        table_SN, page_size = table_SN.copy(), self._own.store.page_size
        for index, place in enumerate(self._places_S):
            for at in range(place.num_tokens):
                page = (place.first_position + at) // page_size
                if self._own.own_T[place.begin + at] % 2 == 0:
                    table_SN[index, page] = self._own.own_T[place.begin + at]
        self._plain_sequences = (table_SN, *others)
        answer = super().attend(*arguments)
        self._plain_sequences = plain
        return answer
