#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "oxytorch/host.h"

namespace oxytorch {
namespace {

void touch(size_t bytes) {
  std::unique_ptr<char[]> block(new char[bytes]);
  std::memset(block.get(), 1, bytes);
  // The compiler may not drop the writes.
  asm volatile("" : : "r"(block.get()) : "memory");
}

TEST(HostAllocatorTest, FreedMemoryIsNotFaultedInAgain) {
  constexpr size_t kBytes = 48 << 20;
  auto setting = tune_allocator();
  if (!setting.is_applied()) GTEST_SKIP() << setting.reason();
  EXPECT_FALSE(setting.cost().empty());
  touch(kBytes);
  const auto start = page_faults();
  for (int i = 0; i < 8; ++i) touch(kBytes);
  EXPECT_LT(page_faults() - start, kBytes / 4096) << "eight blocks took the faults of one or more";
  EXPECT_GE(allocator_retained_bytes().value_or(0), kBytes);
  const auto again = tune_allocator();
  EXPECT_FALSE(again.is_applied()) << "a second call has nothing to do";
  EXPECT_TRUE(again.is_in_effect());
  setting.revert();
  EXPECT_FALSE(setting.is_applied());
  EXPECT_LT(allocator_retained_bytes().value_or(0), kBytes);
}

TEST(HostAllocatorTest, WhatWasGivenBackIsNotHeldFree) {
  constexpr size_t kBytes = 1 << 20, kBlocks = 48;
  auto setting = tune_allocator();
  if (!setting.is_applied()) GTEST_SKIP() << setting.reason();
  trim_heap();
  // Between the large ones stand blocks that live on: free pages inside the heap, which glibc goes on to count.
  std::vector<std::unique_ptr<char[]>> large(kBlocks), small(kBlocks);
  const auto fill = [&] {
    for (size_t i = 0; i < kBlocks; ++i) {
      large[i].reset(new char[kBytes]);
      std::memset(large[i].get(), 1, kBytes);
      if (!small[i]) small[i].reset(new char[4096]);
    }
  };
  for (int i = 0; i < 3; ++i) {
    fill();
    for (auto& block : large) block.reset();
    EXPECT_GE(allocator_retained_bytes().value_or(0), (kBlocks - 2) * kBytes);
    trim_heap();
    EXPECT_LT(allocator_retained_bytes().value_or(0), kBytes);
    EXPECT_LT(allocator_retained_bytes().value_or(0), kBytes);
  }
  setting.revert();
}

// Blocks that glibc takes from its heap wherever its thresholds are: together they are over that for trimming.
uint64_t faults_of_a_step() {
  constexpr size_t kBytes = 96 << 10;
  const auto start = page_faults();
  std::vector<std::unique_ptr<char[]>> blocks(1024);
  for (auto& block : blocks) {
    block.reset(new char[kBytes]);
    std::memset(block.get(), 1, kBytes);
  }
  asm volatile("" : : "r"(blocks.data()) : "memory");
  while (!blocks.empty()) blocks.pop_back();  // the last one lies at the heap's end
  return page_faults() - start;
}

TEST(HostAllocatorTest, AKeptHeapIsNotTrimmed) {
  auto tuned = tune_allocator();
  if (!tuned.is_applied()) GTEST_SKIP() << tuned.reason();
  tuned.revert();  // as trials leave it
  faults_of_a_step();
  ASSERT_GT(faults_of_a_step(), 10'000U) << "glibc trims what a step frees";
  auto kept = keep_heap();
  ASSERT_TRUE(kept.is_applied()) << kept.reason();
  EXPECT_FALSE(kept.cost().empty());
  faults_of_a_step();
  EXPECT_LT(faults_of_a_step(), 1'000U);
  auto again = keep_heap();
  kept.revert();
  EXPECT_LT(faults_of_a_step(), 1'000U) << "another one keeps it";
  tuned = tune_allocator();
  ASSERT_TRUE(tuned.is_applied()) << tuned.reason();
  tuned.revert();
  EXPECT_LT(faults_of_a_step(), 1'000U) << "the allocator's way back leaves it kept";
  again.revert();
  faults_of_a_step();
  EXPECT_GT(faults_of_a_step(), 10'000U);
}

void free_block(size_t bytes) {
  auto* volatile block = new char[bytes];
  delete[] block;
}

// Of a process of its own, whose thresholds nothing has set yet.
int thresholds_go_back() {
  const auto given = heap_mmap_threshold();
  if (!given) return 0;
  if (*given != 128 << 10) return 1;
  free_block(5 << 20);  // a step's
  const auto moved = heap_mmap_threshold();
  if (!moved || *moved < 5 << 20 || *moved > (5 << 20) + 8192) return 2;
  if (heap_mmap_threshold() != moved) return 3;  // asking moves nothing
  note_heap();
  free_block(20 << 20);  // a trial's
  if (heap_mmap_threshold().value_or(0) < 20 << 20) return 4;
  auto kept = keep_heap();
  if (!kept.is_applied() || heap_mmap_threshold() != moved) return 5;  // it changes trimming alone
  auto tuned = tune_allocator();
  if (!tuned.is_applied() || heap_mmap_threshold().value_or(0) < 32 << 20) return 6;
  auto mapped = map_large_blocks(), again = map_large_blocks();
  if (!mapped.is_applied() || heap_mmap_threshold() != 1 << 20) return 9;
  mapped.revert();
  if (heap_mmap_threshold() != 1 << 20) return 10;  // the last one counts
  again.revert();
  if (heap_mmap_threshold().value_or(0) < 32 << 20) return 11;  // tuned again
  mapped = map_large_blocks();
  tuned.revert();
  if (heap_mmap_threshold() != 1 << 20) return 12;
  mapped.revert();
  if (heap_mmap_threshold() != moved) return 7;
  kept.revert();
  note_heap();
  free_block(20 << 20);
  return heap_mmap_threshold() == moved ? 0 : 8;
}

TEST(HostAllocatorTest, ThresholdsGoBackToThoseOfTheProgramsOwnSteps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::_Exit(thresholds_go_back()), testing::ExitedWithCode(0), "");
}

// Of a process of its own: what a step frees lies below a block in use, until a trial frees that.
int free_memory_of_steps_stays() {
  if (!heap_mmap_threshold()) return 0;
  if (faults_of_a_step() < 10'000) return 1;
  std::vector<std::unique_ptr<char[]>> blocks;
  while (blocks.size() < 1024) blocks.emplace_back(new char[96 << 10]);
  asm volatile("" : : "r"(blocks.data()) : "memory");
  auto* volatile above = std::malloc(120 << 10);  // in no hole
  blocks.clear();
  faults_of_a_step();
  if (faults_of_a_step() > 1'000) return 2;
  note_heap();
  auto tuned = tune_allocator();
  std::free(above);
  tuned.revert();
  faults_of_a_step();
  return faults_of_a_step() > 1'000 ? 3 : 0;
}

TEST(HostAllocatorTest, FreeMemoryThatTheProgramsOwnStepsLeftInTheHeapStaysThere) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::_Exit(free_memory_of_steps_stays()), testing::ExitedWithCode(0), "");
}

TEST(HostAllocatorTest, MemoryAboveTheLimitIsGivenBack) {
  auto setting = tune_allocator(64 << 20);
  if (!setting.is_applied()) GTEST_SKIP() << setting.reason();
  const auto before = allocator_trims();
  touch(256 << 20);
  for (int i = 0; i < 100 && allocator_trims() == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_GT(allocator_trims(), before);
  setting.revert();
}

TEST(HostAllocatorTest, TheEnvironmentIsObeyed) {
  setenv("MALLOC_TOP_PAD_", "1048576", 1);
  const auto setting = tune_allocator();
  const auto kept = keep_heap();
  unsetenv("MALLOC_TOP_PAD_");
  EXPECT_FALSE(kept.is_applied());
  EXPECT_FALSE(setting.is_applied());
  EXPECT_FALSE(setting.is_in_effect());
  EXPECT_NE(setting.reason().find("MALLOC_TOP_PAD_"), std::string::npos) << setting.reason();
}

TEST(HostAllocatorTest, PageFaultsAreCounted) {
  const auto start = page_faults();
  std::vector<char> fresh(64 << 20, 1);
  asm volatile("" : : "r"(fresh.data()) : "memory");
  EXPECT_GT(page_faults(), start);
}

}  // namespace
}  // namespace oxytorch
