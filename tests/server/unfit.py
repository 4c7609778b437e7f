"""`ropewalk`, unchanged but for a library that refuses the model's number type.

`python -m tests.server.unfit serve ...`, as oneDNN did with bfloat16 on processors without AVX-512.
"""

from typing import Any

if __name__ == "__main__":
    from ropewalk.__main__ import main
    from ropewalk.model_runtime.layers import packed_linear

    def refuse(*_: Any) -> None:
        """Raise in the midst of a load."""
        raise RuntimeError("needs avx512bw")

    packed_linear.pack = refuse
    main()
