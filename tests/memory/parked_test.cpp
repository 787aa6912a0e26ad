// Tensors whose memory is a file without a name.
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "oxytorch/memory/parked.h"

namespace oxytorch {
namespace {

long resident_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stol(line.substr(6)) >> 10;
  }
  return 0;
}

int files() {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find("oxytorch-parked") != std::string::npos ? 1 : 0;
  return found;
}

bool kernel_can_populate() {  // Linux 5.14
  constexpr int populate_write = 23;
  const auto page = static_cast<std::size_t>(getpagesize());
  void* const memory = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool can = madvise(memory, page, populate_write) == 0;
  munmap(memory, page);
  return can;
}

TEST(ParkedTest, ACopyHasLayoutAndValuesOfAClone) {
  torch::manual_seed(0);
  for (const auto& given :
       {torch::randn({1024, 1024}), torch::randn({512, 1024}).t(),
        torch::randn({8, 16, 64, 64}).contiguous(at::MemoryFormat::ChannelsLast),
        torch::randn({1024, 1024}).to(at::kBFloat16), torch::randn({1024, 2048}).slice(1, 0, 2048, 2)}) {
    auto held = memory::park(given);
    EXPECT_TRUE(memory::is_parked(held));
    EXPECT_EQ(held.strides(), given.clone().strides());
    EXPECT_TRUE(at::equal(held, given));
    memory::rest(held);
    EXPECT_TRUE(at::equal(held, given));
    held.fill_(2);
    memory::rest_all();
    EXPECT_TRUE(at::equal(held, at::full_like(given, 2)));
  }
}

TEST(ParkedTest, WhatCannotBeThereIsClonedInMemory) {
  const auto large = torch::randn({1 << 20});
  for (const auto& given : {torch::randn({3}), torch::empty({0}), torch::randn({512, 512}, at::kComplexFloat).conj()}) {
    const auto held = memory::park(given);
    EXPECT_FALSE(memory::is_parked(held));
    EXPECT_TRUE(at::equal(held.resolve_conj(), given.resolve_conj()));
  }
  const auto held = memory::park(large, {"/proc/oxytorch", "/nowhere"});
  EXPECT_FALSE(memory::is_parked(held));
  EXPECT_TRUE(at::equal(held, large));
  at::Tensor undefined;
  EXPECT_FALSE(memory::is_parked(undefined));
  EXPECT_FALSE(memory::move_to_file(undefined));
  EXPECT_FALSE(memory::move_to_memory(undefined));
}

TEST(ParkedTest, ATensorMovesAndStaysTheSameObject) {
  auto tensor = torch::ones({16 << 20});  // 64 MiB
  const auto other = tensor;              // the same object
  const auto* const impl = tensor.unsafeGetTensorImpl();
  const long before = resident_mib();
  EXPECT_TRUE(memory::move_to_file(tensor));
  EXPECT_FALSE(memory::move_to_file(tensor));
  EXPECT_EQ(tensor.unsafeGetTensorImpl(), impl);
  EXPECT_TRUE(memory::is_parked(other));
  EXPECT_LT(resident_mib(), before - 50);
  tensor.add_(1);
  EXPECT_GT(resident_mib(), before - 20);
  memory::rest(tensor[5]);  // a view of it
  EXPECT_LT(resident_mib(), before - 50);
  if (kernel_can_populate()) {
    memory::populate(tensor);
    EXPECT_GT(resident_mib(), before - 20);
    memory::rest(tensor);
  }
  memory::read_ahead(tensor);
  EXPECT_EQ(other.sum().item<double>(), 32 << 20);
  EXPECT_TRUE(memory::move_to_memory(tensor));
  EXPECT_FALSE(memory::move_to_memory(tensor));
  EXPECT_FALSE(memory::is_parked(other));
  EXPECT_EQ(other.sum().item<double>(), 32 << 20);
}

TEST(ParkedTest, FilesGoWithTheLastTensorOnThem) {
  ASSERT_EQ(files(), 0);
  auto held = memory::park(torch::ones({1 << 20}));
  const auto view = held.slice(0, 7);
  held.reset();
  EXPECT_EQ(files(), 1);
  EXPECT_EQ(view.sum().item<double>(), (1 << 20) - 7);
  held = view.clone();
  EXPECT_FALSE(memory::is_parked(held));
}

TEST(ParkedTest, SmallOnesShareAFile) {
  torch::manual_seed(0);
  std::vector<at::Tensor> given, held;
  for (int i = 0; i < 250; ++i) {
    auto made = torch::randn({40, 30 + i});
    given.push_back(i % 3 == 0 ? made.t() : made);
    held.push_back(memory::park(given.back()));
    EXPECT_TRUE(memory::is_parked(held.back()));
    EXPECT_EQ(held.back().strides(), given.back().clone().strides());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(held.back().data_ptr()) % 64, 0);
  }
  EXPECT_EQ(files(), 2) << "6.2 MB in all";
  held[7].fill_(3);
  memory::rest(held[7]);
  memory::rest_all();
  for (std::size_t i = 0; i < held.size(); ++i)
    EXPECT_TRUE(at::equal(held[i], i == 7 ? at::full_like(given[i], 3) : given[i])) << i;
  const auto last = held.back();
  held.clear();
  EXPECT_EQ(files(), 1);
  EXPECT_TRUE(at::equal(last, given.back()));
  auto small = torch::ones({64, 64});
  EXPECT_FALSE(memory::move_to_file(small));
}

TEST(ParkedTest, AChildWritesOverNothingOfItsParent) {
  const auto first = memory::park(torch::full({64, 64}, 1));
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    char go = 0;  // once the parent has taken what comes next
    if (read(ends[0], &go, 1) != 1) _exit(2);
    const auto other = memory::park(torch::full({64, 64}, 2));
    _exit(at::equal(other, torch::full({64, 64}, 2)) && memory::is_parked(other) ? 0 : 1);
  }
  const auto second = memory::park(torch::full({64, 64}, 3));
  ASSERT_EQ(write(ends[1], "g", 1), 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(ends[0]);
  close(ends[1]);
  EXPECT_TRUE(at::equal(first, torch::full({64, 64}, 1)));
  EXPECT_TRUE(at::equal(second, torch::full({64, 64}, 3)));
  EXPECT_EQ(static_cast<char*>(second.data_ptr()) - static_cast<char*>(first.data_ptr()), 64 * 64 * 8) << "one file";
}

TEST(ParkedTest, FilesAreOnADiskWhereOneIs) {
  const char* const named = std::getenv("TMPDIR");
  const auto before = named == nullptr ? std::nullopt : std::optional<std::string>(named);
  using Folders = std::vector<std::string>;
  unsetenv("TMPDIR");
  EXPECT_EQ(memory::parking_folders(), (Folders{"/var/tmp", "/tmp"}));
  const auto here = std::filesystem::current_path().string();  // where the tests were built
  setenv("TMPDIR", here.c_str(), 1);
  EXPECT_EQ(memory::parking_folders(), (Folders{here, "/var/tmp"}));
  setenv("TMPDIR", "/nowhere", 1);
  EXPECT_EQ(memory::parking_folders(), (Folders{"/var/tmp", "/nowhere"}));
  if (struct statfs found{}; statfs("/dev/shm", &found) == 0 && found.f_type == TMPFS_MAGIC) {
    setenv("TMPDIR", "/dev/shm", 1);
    EXPECT_EQ(memory::parking_folders(), (Folders{"/var/tmp", "/dev/shm"}));
  }
  before ? setenv("TMPDIR", before->c_str(), 1) : unsetenv("TMPDIR");
}

TEST(ParkedTest, PartsAreASixteenthWithinTheirBounds) {
  constexpr std::size_t kMiB = 1 << 20;
  using Parts = std::vector<std::size_t>;
  EXPECT_EQ(memory::parked_parts({}), Parts{});
  EXPECT_EQ(memory::parked_parts({0, 0}), Parts{2});
  EXPECT_EQ(memory::parked_parts(Parts(10, kMiB)), (Parts{4, 4, 2})) << "4 MiB at the least";
  EXPECT_EQ(memory::parked_parts(Parts(32, 8 * kMiB)), Parts(16, 2));
  EXPECT_EQ(memory::parked_parts(Parts(400, 8 * kMiB)), Parts(50, 8)) << "64 MiB at the most";
  EXPECT_EQ(memory::parked_parts({9 * kMiB, kMiB, 100 * kMiB, kMiB, kMiB}), (Parts{1, 1, 1, 2}))
      << "a larger one alone";
}

}  // namespace
}  // namespace oxytorch
