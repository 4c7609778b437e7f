"""The kernel of `attention_ranges.py` over quantised and tail pages.

Its import compiles, so it is imported when the first sequence reads ranges of quantised pages.
"""

from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import SINGLY
from ropewalk.model_runtime.cpu_kernels.attention.attention_ranges import ranges_kernel
from ropewalk.model_runtime.cpu_kernels.quantised.attention import QUANTISED

attend_quantised_ranges = ranges_kernel(SINGLY, QUANTISED)
