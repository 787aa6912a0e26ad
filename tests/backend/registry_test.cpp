#include "oxytorch/backend/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/error.h"

namespace oxytorch::backend {
namespace {

const std::string kFixtures = OXY_FIXTURES;

std::string library(const std::string& name) { return kFixtures + "/liboxytorch-backend-" + name + ".so"; }
std::string refused(const std::string& name) { return kFixtures + "/refused/liboxytorch-backend-" + name + ".so"; }

// Discovery happens once per process, so its environment is set before any test.
class SearchPath : public testing::Environment {
  void SetUp() override {
    setenv("OXYTORCH_BACKEND_PATH", (kFixtures + "::" + kFixtures + "/refused:/nowhere/b.so").c_str(), 1);
    setenv("OXYTORCH_LOG", "off", 1);
  }
};
const auto* const kSearchPath = testing::AddGlobalTestEnvironment(new SearchPath);

template <class Call>
Error caught(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::Internal, "");
}

// A table that keeps the contract on paper; tests change one thing.
std::int32_t unusable(const char** reason, std::int32_t* devices) {
  *reason = "made for a test";
  *devices = 0;
  return 0;
}
oxy_backend paper_backend(const char* name) {
  oxy_backend table{};
  table.size = sizeof(table);
  table.api_version = OXY_BACKEND_API_VERSION;
  table.name = name;
  table.description = "Exists on paper.";
  table.score = unusable;
  table.device_properties = [](std::int32_t, oxy_device_properties*) { return oxy_status{OXY_INTERNAL}; };
  table.memory_info = [](std::int32_t, oxy_memory_info*) { return oxy_status{OXY_INTERNAL}; };
  table.alloc = [](std::int32_t, oxy_memory, std::uint64_t, void**) { return oxy_status{OXY_INTERNAL}; };
  table.free = [](std::int32_t, void*) { return oxy_status{OXY_INTERNAL}; };
  table.copy_async = [](std::int32_t, oxy_queue, void*, const void*, std::uint64_t, oxy_copy) {
    return oxy_status{OXY_INTERNAL};
  };
  table.fill_async = [](std::int32_t, oxy_queue, void*, std::uint8_t, std::uint64_t) {
    return oxy_status{OXY_INTERNAL};
  };
  table.last_error = [] { return "on paper"; };
  return table;
}

TEST(Registry, BuiltInBackendsAreListedWithScoreReasonAndDevices) {
  const std::vector<BackendInfo> all = available_backends();
  const auto named = [&](const char* name) {
    return *std::find_if(all.begin(), all.end(), [&](const BackendInfo& info) { return info.name == name; });
  };
  const BackendInfo cpu = named("cpu");
  EXPECT_EQ(cpu.score, 10);
  EXPECT_EQ(cpu.origin, "built in");
  EXPECT_FALSE(cpu.reason.empty());
  ASSERT_EQ(cpu.devices.size(), 1u);
  EXPECT_EQ(cpu.devices[0].torch_device, "cpu");
  EXPECT_GT(cpu.devices[0].memory_bytes, std::uint64_t{1} << 26);
  const BackendInfo sim = named("sim");
  EXPECT_EQ(sim.score, 1);
  EXPECT_EQ(sim.devices.at(0).name, "Oxytorch simulator");
  EXPECT_EQ(sim.devices.at(0).torch_device, "sim");
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.score > b.score; }));
}

TEST(Registry, BestIsNeverASimulation) {
  EXPECT_EQ(best().name(), "cpu");
  EXPECT_EQ(&best(), &backend("cpu"));
}

TEST(Registry, UnknownNameNamesThoseThereAre) {
  const Error error = caught([] { static_cast<void>(backend("npu")); });
  EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
  EXPECT_NE(std::string(error.what()).find("there is no backend 'npu'; there are: cpu, sim"), std::string::npos)
      << error.what();
}

TEST(Registry, DiscoveryLoadsWhatThePathNamesAndTellsWhatItRefused) {
  Registry::instance().discover();
  const Backend& found = backend("sim-mutant");
  EXPECT_EQ(std::filesystem::path(found.origin()).filename(), "liboxytorch-backend-sim-mutant.so");
  EXPECT_NE(found.configure(), nullptr);
  const std::vector<Problem> problems = Registry::instance().problems();
  ASSERT_EQ(problems.size(), 9u);
  EXPECT_EQ(problems.back().path, "/nowhere/b.so");
  for (const Problem& problem : problems) {
    EXPECT_NE(problem.reason.find(std::filesystem::path(problem.path).stem()), std::string::npos) << problem.reason;
  }
  Registry::instance().discover();
  EXPECT_EQ(Registry::instance().problems().size(), 9u) << "discovery happens once";
}

TEST(Registry, SameFileIsSameBackend) {
  const Backend& first = Registry::instance().load(library("sim-mutant"));
  EXPECT_EQ(&first, &Registry::instance().load(kFixtures + "/../fixtures/liboxytorch-backend-sim-mutant.so"));
  EXPECT_EQ(&first, &backend("sim-mutant"));
}

struct Refusal {
  const char* name;
  ErrorCode code;
  const char* says;
};
class RefusedLibrary : public testing::TestWithParam<Refusal> {};

TEST_P(RefusedLibrary, IsRefusedInOneClearSentence) {
  const Error error = caught([] { Registry::instance().load(refused(GetParam().name)); });
  EXPECT_EQ(error.code(), GetParam().code) << error.what();
  EXPECT_NE(std::string(error.what()).find(GetParam().says), std::string::npos) << error.what();
  EXPECT_NE(std::string(error.what()).find(GetParam().name), std::string::npos) << error.what();
}
INSTANTIATE_TEST_SUITE_P(
    Faults, RefusedLibrary,
    testing::Values(Refusal{"no-entry", ErrorCode::NotSupported, "exports no 'oxy_backend_entry'"},
                    Refusal{"null-table", ErrorCode::InvalidArgument, "gave no table"},
                    Refusal{"old-version", ErrorCode::InvalidArgument, "was built for API version 0"},
                    Refusal{"small-table", ErrorCode::InvalidArgument, "version 1 needs at least"},
                    Refusal{"empty-slot", ErrorCode::InvalidArgument, "leaves the required slot 'fill_async' NULL"},
                    Refusal{"half-queues", ErrorCode::InvalidArgument, "fills 1 of the 6 slots of the queue group"},
                    Refusal{"bad-name", ErrorCode::InvalidArgument, "the name 'No Name'"},
                    Refusal{"taken-name", ErrorCode::InvalidState, "a backend named 'cpu' is registered already"}),
    [](const auto& info) {
      std::string name = info.param.name;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(Registry, RefusesWhatIsNoLibrary) {
  EXPECT_EQ(caught([] { Registry::instance().load("/nowhere/at/all.so"); }).code(), ErrorCode::NotFound);
  EXPECT_EQ(caught([] { Registry::instance().load("/tmp"); }).code(), ErrorCode::NotFound);
  const std::string path = testing::TempDir() + "/text.so";
  std::ofstream(path) << "not a library\n";
  EXPECT_EQ(caught([&] { Registry::instance().load(path); }).code(), ErrorCode::NotSupported);
  std::filesystem::remove(path);
}

TEST(Registry, ReadsAShorterAndALongerTableThanItsOwn) {
  // Of a later release: slots appended that this host does not know.
  struct Longer {
    oxy_backend known;
    void (*unknown)();
  };
  static Longer longer{paper_backend("test-longer"), [] { FAIL() << "an unknown slot was called"; }};
  longer.known.size = sizeof(Longer);
  const Backend& accepted = Registry::instance().add(&longer.known, "a test");
  EXPECT_EQ(accepted.info().reason, "made for a test");
  EXPECT_TRUE(accepted.info().devices.empty());
  EXPECT_FALSE(accepted.has_queues());
  EXPECT_EQ(accepted.table().size, sizeof(Longer));
  const Error again = caught([] { Registry::instance().add(&longer.known, "another test"); });
  EXPECT_EQ(again.code(), ErrorCode::InvalidState);
  EXPECT_NE(std::string(again.what()).find("the one from another test is refused"), std::string::npos);
}

TEST(Registry, DeviceThatCannotBeDescribedIsLeftOutAloud) {
  static oxy_backend table = paper_backend("test-mute");
  table.score = [](const char** reason, std::int32_t* devices) {
    *reason = "claims one device.";
    *devices = 1;
    return 3;
  };
  const BackendInfo info = Registry::instance().add(&table, "a test").info();
  EXPECT_EQ(info.score, 3);
  EXPECT_TRUE(info.devices.empty());
  EXPECT_EQ(info.reason, "claims one device. Device 0 is left out: on paper");
}

TEST(Registry, ManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int index = 0; index < 8; ++index) {
    threads.emplace_back([index] {
      for (int turn = 0; turn < 10; ++turn) {
        EXPECT_GE(available_backends().size(), 3u);
        EXPECT_EQ(Registry::instance().load(library("sim-mutant")).name(), "sim-mutant");
        if (index % 2 == 0) {
          EXPECT_THROW(Registry::instance().load(refused("bad-name")), Error);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace oxytorch::backend
