/// The monitor module: step and phase times with nothing on the step path but clock reads and stores into memory
/// taken beforehand, sinks that receive the finished steps, and reports to read.
#pragma once

#include "oxytorch/monitor/performance_monitor.h"
#include "oxytorch/monitor/report.h"
#include "oxytorch/monitor/sink.h"
