"""Data pipeline: datasets in the formats people have, and a loader that makes batches with threads."""

from __future__ import annotations

from .._C.data import Cache as Cache
from .._C.data import Dataset as Dataset
from .._C.data import Field as Field
from .._C.data import decode_image as decode_image
from .._C.data import encode_jpeg as encode_jpeg
from .._C.data import resize as resize
from .batch_sizer import BatchSizer as BatchSizer
from .convert import convert as convert
from .convert import tokenize as tokenize
from .loader import Loader as Loader
from .sampling import Bucketed as Bucketed
from .sampling import Mixed as Mixed
from .sampling import ShuffledBlocks as ShuffledBlocks
from .sampling import Weighted as Weighted
from .sources import TokenWindows as TokenWindows
from .sources import concatenate as concatenate
from .sources import open as open
from .sources import open_raw as open_raw
from .transforms import CenterCrop as CenterCrop
from .transforms import ColorJitter as ColorJitter
from .transforms import CutMix as CutMix
from .transforms import HorizontalFlip as HorizontalFlip
from .transforms import MixUp as MixUp
from .transforms import Normalize as Normalize
from .transforms import RandAugment as RandAugment
from .transforms import RandomResizedCrop as RandomResizedCrop
from .transforms import Resize as Resize
from .tune import LoaderTrial as LoaderTrial
from .tune import TunedLoader as TunedLoader
from .tune import tune as tune
