"""The contract between the portable core and its plugins; imports no torch.

Each module names what it offers in its own ``__all__``.
"""

from anygauge.interface.backend import *
from anygauge.interface.collectives import *
from anygauge.interface.container_image import *
from anygauge.interface.engine import *
from anygauge.interface.environment import *
from anygauge.interface.estimate import *
from anygauge.interface.fabric import *
from anygauge.interface.graph import *
from anygauge.interface.hardware import *
from anygauge.interface.job import *
from anygauge.interface.kernels import *
from anygauge.interface.launch import *
from anygauge.interface.model import *
from anygauge.interface.node import *
from anygauge.interface.options import *
from anygauge.interface.placement import *
from anygauge.interface.plugins import *
from anygauge.interface.probe import *
from anygauge.interface.profiler import *
from anygauge.interface.strategy import *
from anygauge.interface.support import *
from anygauge.util.errors import *
