"""Losses of rows of classes under one softmax."""
