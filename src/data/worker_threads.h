/// Threads that take jobs in the order in which they were added.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace oxytorch::data {

class WorkerThreads {
 public:
  explicit WorkerThreads(int count);
  /// Drops jobs that have not begun, and waits for those that have.
  ~WorkerThreads();
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;
  /// `job` must not throw.
  void add(std::function<void()> job);
  /// Does the job that comes next in the calling thread; false where there is none.
  bool help();

 private:
  void run();
  void take_one(std::unique_lock<std::mutex>& lock);
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> jobs_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace oxytorch::data
