from . import data as data
from . import objectives as objectives
from . import projections as projections
from . import rules as rules
from . import zoo as zoo
from .common.errors import TpsgdError as TpsgdError
from .comparison.compare import compare as compare
from .comparison.search import search as search
from .engine.arm import Arm as Arm
from .engine.check_rule import check_rule as check_rule
from .engine.confusion import confusion as confusion
from .engine.evaluate import evaluate as evaluate
from .engine.fit import fit as fit
from .engine.fit import fit_backprop as fit_backprop
from .engine.learners.optimizers import momentum as momentum
from .engine.learners.optimizers import sgd as sgd
from .engine.learners.optimizers import two_rates as two_rates
from .engine.record import Run as Run
from .engine.restarts import fit_many as fit_many
from .engine.settings import EarlyStopping as EarlyStopping
from .engine.settings import Memory as Memory
from .engine.solvers import ridge as ridge
from .engine.solvers import rls as rls
from .engine.sources import augment as augment
from .engine.trained import Trained as Trained
from .engine.trained import load as load
from .features import logs as logs
from .losses import bce as bce
from .losses import cross_entropy as cross_entropy
from .losses import huber as huber
from .losses import l1 as l1
from .losses import mse as mse
from .maths.learning_rates import one_cycle as one_cycle
from .memory.plan import plan as plan
from .nets import inits as inits
from .nets.cuts.split import split as split
from .nets.padded import Padded as Padded
from .nets.recurrent import Recurrent as Recurrent
from .objectives import Place as Place
from .rules import Rule as Rule
from .saved.checkpoint import Checkpoint as Checkpoint
from .train import sequential as sequential
from .train import simultaneous as simultaneous

__version__: str

def __getattr__(name: str): ...  # of plug-ins
