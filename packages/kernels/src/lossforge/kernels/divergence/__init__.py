"""Losses between the softmax of rows and that of a teacher."""
