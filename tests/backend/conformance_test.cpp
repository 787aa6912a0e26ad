// The suite under test: it passes what is right and catches each planted bug, by the check that is meant to.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

struct Result {
  int status = -1;
  std::string output;
};

Result run(const std::string& arguments, const std::string& environment = "") {
  Result result;
  FILE* pipe = popen((environment + " " OXY_CONFORMANCE " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer;
  while (const std::size_t got = fread(buffer.data(), 1, buffer.size(), pipe)) result.output.append(buffer.data(), got);
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Mutant {
  const char* name;
  const char* caught_by;
};

class PlantedBug : public testing::TestWithParam<Mutant> {};

TEST_P(PlantedBug, IsCaught) {
  const std::string settings =
      "OXYTORCH_SIM=devices=2,memory=64MiB OXYTORCH_SIM_MUTANT=" + std::string(GetParam().name);
  const Result result = run(OXY_MUTANT " --timeout 20 --only " + std::string(GetParam().caught_by), settings);
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_TRUE(contains(result.output, "clause ")) << result.output;
}

INSTANTIATE_TEST_SUITE_P(Sim, PlantedBug,
                         testing::Values(Mutant{"swaps_copies", "order.fills_in_order"},
                                         Mutant{"newest_first", "order.one_queue"},                  //
                                         Mutant{"drops_copies", "copy.round_trip"},                  //
                                         Mutant{"leak", "memory.thousand"},                          //
                                         Mutant{"counts_blocks", "memory.accounting"},               //
                                         Mutant{"memory_info_zero", "memory.accounting"},            //
                                         Mutant{"free_bytes_wrong", "memory.accounting"},            //
                                         Mutant{"copy_rounds_down", "copy.round_trip"},              //
                                         Mutant{"copy_one_more", "copy.host_to_device"},             //
                                         Mutant{"copy_reversed", "copy.device_to_device"},           //
                                         Mutant{"fill_ignores_size", "copy.fill"},                   //
                                         Mutant{"fill_rounds_down", "copy.fill"},                    //
                                         Mutant{"fill_ignores_value", "copy.fill"},                  //
                                         Mutant{"stale_event", "order.event_moves"},                 //
                                         Mutant{"event_too_early", "order.event_host_wait"},         //
                                         Mutant{"queue_wait_ignored", "order.cross_queue"},          //
                                         Mutant{"queue_wait_blocks", "order.wait_does_not_block"},   //
                                         Mutant{"timeout_says_ok", "order.event_query"},             //
                                         Mutant{"sync_returns_early", "order.synchronize_queue"},    //
                                         Mutant{"sync_one_queue", "order.synchronize_device"},       //
                                         Mutant{"destroy_drops_work", "order.destroy_finishes"},     //
                                         Mutant{"null_queue_lags", "copy.blocking"},                 //
                                         Mutant{"double_free_ok", "memory.bad_free"},                //
                                         Mutant{"free_null_refused", "memory.zero_bytes"},           //
                                         Mutant{"zero_bytes_refused", "memory.zero_bytes"},          //
                                         Mutant{"oom_says_ok", "memory.too_much"},                   //
                                         Mutant{"oom_leaves_pointer", "memory.too_much"},            //
                                         Mutant{"size_overflow", "memory.too_much"},                 //
                                         Mutant{"misaligned", "memory.alignment"},                   //
                                         Mutant{"ignores_struct_size", "contract.structure_sizes"},  //
                                         Mutant{"null_text", "contract.texts"},                      //
                                         Mutant{"null_error", "contract.texts"},                     //
                                         Mutant{"counters_overrun", "contract.counters"},            //
                                         Mutant{"score_wanders", "contract.score_stable"},           //
                                         Mutant{"accepts_bad_device", "faults.bad_device"},          //
                                         Mutant{"accepts_foreign_queue", "faults.foreign_queue"},    //
                                         Mutant{"silent_errors", "faults.null_arguments"},           //
                                         Mutant{"error_shared", "faults.message_per_thread"},        //
                                         Mutant{"swallows_errors", "faults.injected_copy"},          //
                                         Mutant{"error_told_once", "faults.injected_copy"},          //
                                         Mutant{"event_hides_errors", "faults.injected_event"},      //
                                         Mutant{"wait_hides_errors", "faults.injected_event"},       //
                                         Mutant{"lost_device_works", "faults.injected_loss"},        //
                                         Mutant{"kernel_wrong_correction", "kernels.rules"},         //
                                         Mutant{"kernel_no_decay", "kernels.rules"},                 //
                                         Mutant{"kernel_last_chunk", "kernels.rules"},               //
                                         Mutant{"kernel_no_ema", "kernels.rules"},                   //
                                         Mutant{"kernel_step_kept", "kernels.rules"},                //
                                         Mutant{"kernel_step_twice", "kernels.rules"},               //
                                         Mutant{"kernel_copy_cut", "kernels.rules"},                 //
                                         Mutant{"kernel_no_unscale", "kernels.verdict"},             //
                                         Mutant{"kernel_clip_epsilon", "kernels.verdict"},           //
                                         Mutant{"kernel_no_zero", "kernels.verdict"},                //
                                         Mutant{"kernel_no_statistics", "kernels.verdict"},          //
                                         Mutant{"kernel_no_agc", "kernels.limits"},                  //
                                         Mutant{"kernel_host_lr", "kernels.learning_rate"},          //
                                         Mutant{"kernel_lost_sum", "kernels.absent_gradient"},       //
                                         Mutant{"kernel_skip_ignored", "kernels.skip"},              //
                                         Mutant{"kernel_skip_counts", "kernels.skip"},               //
                                         Mutant{"kernel_found_inf_lost", "kernels.skip"},            //
                                         Mutant{"kernel_ignores_queue", "kernels.order"},            //
                                         Mutant{"kernel_allocates", "kernels.steady"},               //
                                         Mutant{"kernel_leaks", "kernels.leaks"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Conformance, PassesTheSameLibraryWithoutABug) {
  const Result result = run(OXY_MUTANT, "OXYTORCH_SIM=devices=2,memory=64MiB");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_TRUE(contains(result.output, " passed, 0 skipped, 0 failed")) << result.output;
}

TEST(Conformance, VerdictSaysClauseExpectedAndSeen) {
  const Result result = run(OXY_MUTANT " --only memory.accounting", "OXYTORCH_SIM_MUTANT=leak");
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(contains(result.output, "FAIL  memory.accounting")) << result.output;
  EXPECT_TRUE(contains(result.output, "clause M4: ")) << result.output;
  EXPECT_TRUE(contains(result.output, "expected: allocated_bytes back at 0 when all is freed")) << result.output;
  EXPECT_TRUE(contains(result.output, "seen:     1115113")) << result.output;
}

TEST(Conformance, WritesJson) {
  const Result result = run(OXY_MUTANT " --json --only contract.table,memory.accounting", "OXYTORCH_SIM_MUTANT=leak");
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(contains(result.output, "\"backend\": \"sim-mutant\"")) << result.output;
  EXPECT_TRUE(contains(result.output, "\"passed\": 1, \"skipped\": 0, \"failed\": 1")) << result.output;
  EXPECT_TRUE(contains(result.output, "{\"name\": \"contract.table\", \"clause\": \"C1\"")) << result.output;
}

TEST(Conformance, CrashAndHangAreVerdicts) {
  const Result crash = run(OXY_MUTANT " --only faults.bad_device", "OXYTORCH_SIM_MUTANT=accepts_bad_device");
  EXPECT_EQ(crash.status, 1) << crash.output;
  const Result hang = run("sim --timeout 1 --only order.event_host_wait", "OXYTORCH_SIM=latency_us=3000000");
  EXPECT_EQ(hang.status, 1);
  EXPECT_TRUE(contains(hang.output, "HANG  order.event_host_wait")) << hang.output;
}

TEST(Conformance, ListsItsChecks) {
  const Result result = run("--list");
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(contains(result.output, "order.cross_queue")) << result.output;
}

TEST(Conformance, ExitsWithTwoForBadUsage) {
  EXPECT_EQ(run("--what").status, 2);
  EXPECT_EQ(run("cpu sim").status, 2);
  EXPECT_EQ(run("cpu --only no.such_check").status, 2);
  EXPECT_EQ(run("no-such-backend").status, 2);
  EXPECT_EQ(run("/nowhere/lib.so").status, 2);
}

TEST(Conformance, UnusableBackendIsNotProven) {
  const Result result = run("sim", "OXYTORCH_SIM=devices=99");
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_TRUE(contains(result.output, "nothing was proven")) << result.output;
}

}  // namespace
