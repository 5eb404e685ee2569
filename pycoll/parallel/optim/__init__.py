"""Optimizers whose steps depend on whole tensors: norms, factored state, products of matrices.

They are optimizers of torch. Given to `pc.optimizer`, they see whole tensors also where a rank has
pieces of them, so weights do not depend on the mesh.
"""

from pycoll.parallel.optim.adafactor import Adafactor
from pycoll.parallel.optim.layerwise import LAMB, LARS, Layerwise
from pycoll.parallel.optim.muon import Muon
from pycoll.parallel.optim.tensors import OfWholeTensors

__all__ = ["LAMB", "LARS", "Adafactor", "Layerwise", "Muon", "OfWholeTensors"]
