"""The losses in other people's training, one line a library. A module of a library imports it when it is called.

Each `patch()` compares the names that it replaces with those that it was tested with, and returns a handle that can undo it. Where an
option of the library is not in the losses, the library's own code runs, and one line of the log says so.
"""
