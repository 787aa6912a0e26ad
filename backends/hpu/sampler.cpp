#include "backends/hpu/sampler.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace oxytorch::backend::hpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPeriod{1000};
constexpr milliseconds kPatience{2000};
constexpr milliseconds kInterest{10000};  // sampling goes on so long after the last question
constexpr const char* kSharedMemory = "/dev/shm";

std::atomic<bool> in_forked_child{false};

std::string version(HlmlStatus (*read)(char*, unsigned)) {
  char text[128] = "";
  return read != nullptr && read(text, sizeof(text) - 1) == 0 ? text : "";
}

// Opens the library and finds the cards; what goes wrong becomes the snapshot's problem.
bool find_cards(Hlml& hlml, Snapshot& found, bool& ours) {
  if (!open_hlml(hlml, found.library, found.problem)) {
    found.library.clear();
    return false;
  }
  for (const Meter& meter : meters()) found.present.push_back(meter.present(hlml));
  HlmlStatus status = hlml.init();
  ours = status == 0;
  if (status != 0 && status != kHlmlAlreadyInitialized) {
    found.problem = "hlml_init failed: " + hlml_says(status);
    return false;
  }
  found.hlml = version(hlml.get_hlml_version);
  found.driver = version(hlml.get_driver_version);
  unsigned count = 0;
  status = hlml.device_get_count(&count);
  if (status != 0 || count == 0) {
    found.problem =
        status != 0 ? "libhlml.so cannot count the Gaudi cards: " + hlml_says(status) : "libhlml.so sees no Gaudi card";
    return false;
  }
  for (unsigned index = 0; index < count; ++index) {
    Card card;
    status = hlml.device_get_handle_by_index(index, &card.handle);
    if (status == 0) {
      describe_card(hlml, card);
    } else {
      card.handle = nullptr;
      card.lost = true;
      card.unknown.emplace_back("card", hlml_says(status));
    }
    found.cards.push_back(std::move(card));
  }
  return true;
}

}  // namespace

// Never destroyed: a thread that a hanging card keeps may outlive the process's static objects.
struct Sampler::State {
  std::mutex mutex;
  std::condition_variable asked_condition, told_condition;
  std::shared_ptr<const Snapshot> newest;
  steady_clock::time_point wanted_until;
  bool started = false, silent = false, ending = false, ended = false;
  std::thread thread;

  void publish(const Snapshot& snapshot) {
    const std::lock_guard lock(mutex);
    newest = std::make_shared<const Snapshot>(snapshot);
    silent = false;
    told_condition.notify_all();
  }

  // Where cards cannot be read there is nothing newer to wait for.
  [[nodiscard]] bool knows(bool sampled) const {
    return newest != nullptr &&
           (!sampled || !newest->problem.empty() || steady_clock::now() - newest->taken < 2 * kPeriod);
  }

  void run() {
    Hlml hlml;
    Snapshot now;
    bool ours = false;
    const bool readable = find_cards(hlml, now, ours);
    publish(now);
    std::unique_lock lock(mutex);
    while (!ending) {
      asked_condition.wait(lock, [&] { return ending || (readable && steady_clock::now() < wanted_until); });
      if (ending) break;
      lock.unlock();
      for (Card& card : now.cards) {
        if (card.handle != nullptr) read_card(hlml, card, kSharedMemory);
      }
      now.taken = steady_clock::now();
      publish(now);
      lock.lock();
      asked_condition.wait_for(lock, kPeriod, [this] { return ending; });
    }
    lock.unlock();
    if (ours && hlml.shutdown != nullptr) hlml.shutdown();
    lock.lock();
    ended = true;
    told_condition.notify_all();
  }

  // A thread that a card keeps busy is left behind rather than waited for.
  void end() {
    if (forked()) return;
    std::unique_lock lock(mutex);
    if (!thread.joinable()) return;
    ending = true;
    asked_condition.notify_all();
    const bool done = told_condition.wait_for(lock, kPeriod, [this] { return ended; });
    lock.unlock();
    if (done) {
      thread.join();
    } else {
      thread.detach();
    }
  }
};

Sampler::Sampler() : state_(new State()) {}

Sampler& Sampler::instance() {
  static Sampler* const instance = [] {
    pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });
    return new Sampler();
  }();
  static const struct AtExit {
    ~AtExit() { Sampler::instance().state_->end(); }
  } at_exit;
  static_cast<void>(at_exit);
  return *instance;
}

std::shared_ptr<const Snapshot> Sampler::wait(bool sampled) {
  if (forked()) {
    auto told = std::make_shared<Snapshot>();
    told->problem = "this process was forked from one that had read the Gaudi cards; start it by exec or spawn";
    return told;
  }
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (!state.started) {
    state.started = true;
    state.thread = std::thread([&state] { state.run(); });
  }
  if (sampled) {
    state.wanted_until = steady_clock::now() + kInterest;
    state.asked_condition.notify_all();
  }
  // Who has been kept waiting once is not kept again until there is an answer.
  if (!state.silent) state.told_condition.wait_for(lock, kPatience, [&] { return state.knows(sampled); });
  if (state.knows(sampled)) return state.newest;
  state.silent = true;
  auto told = std::make_shared<Snapshot>();
  if (state.newest != nullptr) *told = *state.newest;
  told->problem = "libhlml.so has not answered for 2 seconds";
  for (Card& card : told->cards) card.values.clear();
  return told;
}

std::shared_ptr<const Snapshot> Sampler::facts() { return wait(false); }
std::shared_ptr<const Snapshot> Sampler::sample() { return wait(true); }

bool forked() { return in_forked_child.load(std::memory_order_relaxed); }

}  // namespace oxytorch::backend::hpu
