"""The command line: each command turns words into a call of the library.

`options` declares the options once per group, `terminal` prints, the other files are commands. May
import everything, but torch only inside functions, so that `--help` is fast.
"""
