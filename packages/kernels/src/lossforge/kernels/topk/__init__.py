"""A teacher known by its likeliest classes."""
