"""The records of all losses, a family a file: each stands from its cases to its targets in one place."""

# isort: off
from lossforge.bench.records import classes as classes
from lossforge.bench.records import binary as binary
from lossforge.bench.records import regression as regression
from lossforge.bench.records import divergence as divergence
from lossforge.bench.records import boxes as boxes
from lossforge.bench.records import masks as masks
from lossforge.bench.records import features as features
from lossforge.bench.records import language as language
