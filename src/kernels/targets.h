/// The instruction sets that kernels are compiled for: included before anything of Highway's. Those of x86-64 are a
/// scalar one, AVX2 and AVX-512; newer releases of Highway know more.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | OXY_NEWER_TARGETS)
#define HWY_COMPILE_ALL_ATTAINABLE
#include <hwy/detect_targets.h>

#ifdef HWY_SSE2
#define OXY_NEWER_TARGETS (HWY_SSE2 | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#else
#define OXY_NEWER_TARGETS 0
#endif
