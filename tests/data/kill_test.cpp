// A run that is killed at any moment and goes on, with other threads and processes each time, draws what an undisturbed
// run draws, to the byte. OXYTORCH_KILLS says how often: 40 unless set, 1,000 in `make nightly`.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "data/file.h"
#include "oxytorch/data/loader.h"
#include "record_test_files.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kGlobal = 12, kSamples = 600;

/// Adds a random number to the sample's.
StagePtr noise() {
  return stage("noise", [](Item& item, PhiloxStream& random) {
    auto number = elements_of<std::int64_t>(item.sample[0])[0];
    number += static_cast<std::int64_t>(random.next() % 1000) << 32;
    item.sample[0] = own(DType::I64, {}, std::as_bytes(std::span(&number, 1)));
  });
}

struct Training {
  const TestFolder& folder;
  std::shared_ptr<const Dataset> dataset;

  [[nodiscard]] std::vector<std::unique_ptr<Loader>> loaders(std::int64_t world, int threads, bool cached) const {
    std::vector<std::unique_ptr<Loader>> made;
    const auto cache =
        cached ? std::make_shared<Cache>(CacheOptions{.memory = "0", .disk = "1MB", .folder = folder / "cache"})
               : nullptr;
    for (std::int64_t rank = 0; rank < world; ++rank) {
      made.push_back(std::make_unique<Loader>(dataset, LoaderOptions{.batch_size = kGlobal / world,
                                                                     .stages = {noise()},
                                                                     .shuffle = true,
                                                                     .seed = 3,
                                                                     .rank = rank,
                                                                     .world_size = world,
                                                                     .threads = threads,
                                                                     .cache = cache}));
    }
    return made;
  }

  /// The next global batch, whatever epoch it is of.
  static std::string next(const std::vector<std::unique_ptr<Loader>>& loaders) {
    std::string bytes;
    for (const auto& loader : loaders) {
      auto batch = loader->next();
      if (!batch) batch = loader->next();  // of the next epoch
      bytes += batch->columns[0].array.data.text();
    }
    return fingerprint_of({bytes});
  }

  /// Trains until it is killed: notes each batch, then where it is.
  void train(std::int64_t world, int threads, bool cached) const {
    const auto made = loaders(world, threads, cached);
    std::int64_t step = 0;
    std::string state;
    if (std::ifstream saved(folder / "state"); saved >> step && std::getline(saved >> std::ws, state)) {
      for (const auto& loader : made) loader->load_state(state);
    }
    const int journal = ::open((folder / "journal").c_str(), O_WRONLY | O_APPEND | O_CREAT, 0644);
    for (;; ++step) {
      const auto line = std::to_string(step) + " " + next(made) + "\n";
      if (::write(journal, line.data(), line.size()) != static_cast<ssize_t>(line.size())) ::_exit(1);
      std::ofstream(folder / "state.new") << step + 1 << "\n" << made[0]->state();
      std::filesystem::rename(folder / "state.new", folder / "state");
    }
  }
};

TEST(Loader, KillsAndResumesLeaveTheStreamAsItIs) {
  const char* asked = std::getenv("OXYTORCH_KILLS");
  const int kills = asked == nullptr ? 40 : std::atoi(asked);
  const TestFolder folder;
  std::string numbers;
  for (std::int64_t i = 0; i < kSamples; ++i) numbers += packed(i);
  const Training training{folder, open_raw(folder.write("numbers", numbers), DType::I64, {})};
  PhiloxStream random(11);
  for (int kill = 0; kill < kills; ++kill) {
    const std::int64_t world = std::vector<std::int64_t>{1, 2, 3, 6}[random.next() % 4];
    const int threads = 1 + static_cast<int>(random.next() % 3);
    const bool cached = random.next() % 2 == 0;
    const auto microseconds = 2000 + random.next() % 30'000;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        training.train(world, threads, cached);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      ::_exit(1);
    }
    ::usleep(microseconds);
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended by itself";
  }

  std::ifstream journal(folder / "journal");
  std::map<std::int64_t, std::vector<std::string>> noted;
  std::int64_t step = 0;
  for (std::string hash; journal >> step >> hash;) noted[step].push_back(hash);
  ASSERT_GT(noted.size(), static_cast<std::size_t>(kSamples / kGlobal)) << "no epoch was finished";
  const auto undisturbed = training.loaders(1, 1, false);
  std::int64_t expected = 0;
  for (const auto& [at, hashes] : noted) {
    ASSERT_EQ(at, expected++) << "a batch is missing";
    const auto hash = Training::next(undisturbed);
    for (const auto& one : hashes) ASSERT_EQ(one, hash) << "batch " << at;
  }
}

}  // namespace
}  // namespace oxytorch::data
