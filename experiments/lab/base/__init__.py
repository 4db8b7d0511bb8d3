"""The ground floor, which every folder may import: it imports nothing else of the app."""
