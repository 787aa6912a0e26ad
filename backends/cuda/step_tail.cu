// The step tail's kernels for the card: the arithmetic is that of kernels/device, which the tests run on the processor.
#include "kernels/device/cuda_grid.h"

OXY_TAIL_DEFINE_CUDA_KERNELS
