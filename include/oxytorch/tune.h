/// The orchestrator: tries what may make a training step faster on the step itself, and keeps what pays and is proven.
/// Programs on Oxytorch::core include the headers of its decisions alone (asked.h, duel.h, search.h, certificate.h,
/// change.h, guard.h, workload.h, tuner.h, watch.h).
#pragma once

#include "oxytorch/tune/accelerate.h"
#include "oxytorch/tune/asked.h"
#include "oxytorch/tune/batch.h"
#include "oxytorch/tune/batch_size.h"
#include "oxytorch/tune/block.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/tune/change.h"
#include "oxytorch/tune/duel.h"
#include "oxytorch/tune/guard.h"
#include "oxytorch/tune/host.h"
#include "oxytorch/tune/kind.h"
#include "oxytorch/tune/kinks.h"
#include "oxytorch/tune/measure.h"
#include "oxytorch/tune/run.h"
#include "oxytorch/tune/search.h"
#include "oxytorch/tune/snapshot.h"
#include "oxytorch/tune/strategy.h"
#include "oxytorch/tune/timing.h"
#include "oxytorch/tune/training_step.h"
#include "oxytorch/tune/tuner.h"
#include "oxytorch/tune/verdict.h"
#include "oxytorch/tune/verify.h"
#include "oxytorch/tune/watch.h"
#include "oxytorch/tune/workload.h"
