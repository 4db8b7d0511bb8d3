"""Definitions of the losses of classes: of rows of classes that exclude each other, and of classes each by itself."""
