#include "data/worker_threads.h"

namespace oxytorch::data {

WorkerThreads::WorkerThreads(int count) {
  for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
}

WorkerThreads::~WorkerThreads() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  more_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void WorkerThreads::add(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  more_.notify_one();
}

void WorkerThreads::run() {
  for (;;) {
    std::unique_lock lock(mutex_);
    more_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
    if (ends_) return;
    take_one(lock);
  }
}

bool WorkerThreads::help() {
  std::unique_lock lock(mutex_);
  if (jobs_.empty()) return false;
  take_one(lock);
  return true;
}

void WorkerThreads::take_one(std::unique_lock<std::mutex>& lock) {
  const auto job = std::move(jobs_.front());
  jobs_.pop_front();
  lock.unlock();
  job();
}

}  // namespace oxytorch::data
