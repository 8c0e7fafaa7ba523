"""The CPU kernels in C++: built for the processor they run on, on its machine or ahead for its class.

`src/` holds the sources (a plain C ABI, no torch headers). `build` finds a library that was compiled ahead
(`ahead`), or compiles one into a cache; `library` loads it with ctypes, whose calls release the interpreter
lock. `python -m engine.native` compiles before a start needs it.
"""
