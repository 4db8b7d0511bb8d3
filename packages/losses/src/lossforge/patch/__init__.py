"""Run a script of another library with the losses in it, unedited: `python -m lossforge.patch timm -- train.py …`."""
