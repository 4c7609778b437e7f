"""The kernel of `attention_ranges.py` over sealed and open pages.

Its import compiles, so it is imported when the first sequence reads ranges of sealed pages.
"""

from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import SINGLY
from ropewalk.model_runtime.cpu_kernels.attention.attention_ranges import ranges_kernel
from ropewalk.model_runtime.cpu_kernels.sealed.attention import SEALED

attend_sealed_ranges = ranges_kernel(SINGLY, SEALED)
