// The library's log on its way to Python.
//
// Whoever logs never waits for the GIL: one who holds it may be waiting for that very thread, or for a lock that it
// holds. A message is put in a queue. A thread that holds the GIL empties it at once; else a short-lived thread does,
// which nobody waits for, or the bound call that is under way, when it ends (GilReleased). Not Py_AddPendingCall(): it
// would enter a handler in the middle of that handler, and queue.Queue's lock is not for that.
#include <pybind11/typing.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bindings.h"
#include "oxytorch/logging.h"

namespace oxytorch::bindings {
namespace {

using Receiver = py::typing::Callable<void(py::str, py::str, py::str, py::float_)>;

struct Message {
  LogLevel level;
  std::string module;
  std::string text;
  double created;  // seconds since the epoch
};

/// Leaked on purpose: threads may still log while the process ends.
struct Queue {
  std::mutex mutex;  // never held while Python runs
  std::vector<Message> messages;
  bool open = false;  // false once the interpreter ends: it is not called from then on
  std::atomic<bool> waiting{false};
  bool coming = false;             // a thread that delivers was started and has not begun
  std::atomic<int> delivering{0};  // threads that are in Python with messages, or on their way there
  py::function receive;            // with the GIL
};

Queue& queue() {
  static Queue* const instance = new Queue;
  return *instance;
}

constexpr std::size_t kMostMessages = 10'000;
constexpr int kMostWaits = 1000;  // milliseconds

void hand_over(const Message& message) {
  try {
    const auto text = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(message.text.data(), static_cast<Py_ssize_t>(message.text.size()), "replace"));
    if (!text) throw py::error_already_set();
    queue().receive(name(message.level), message.module, text, message.created);
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // it was for the program
    log_to_stderr(LogLevel::Error, std::string("the log sink failed: ") + error.what());
    log_to_stderr(message.level, message.text);
  }
}

void deliver_from_a_thread() noexcept {
  queue().coming = true;
  ++queue().delivering;
  try {
    std::thread([] {
      {
        const py::gil_scoped_acquire gil;
        {
          const std::lock_guard lock(queue().mutex);
          queue().coming = false;
        }
        deliver_log();
      }
      --queue().delivering;
    }).detach();
  } catch (const std::exception&) {  // no thread to be had: whoever delivers next does
    queue().coming = false;
    --queue().delivering;
  }
}

void enqueue(const LogRecord& record) {
  static thread_local bool delivering = false;
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  bool holds_gil = false;
  {
    const std::lock_guard lock(queue().mutex);
    // What a receiver's own work logs goes to stderr: it would be received for ever.
    if (!queue().open || delivering || queue().messages.size() >= kMostMessages) {
      log_to_stderr(record.level, record.message);
      return;
    }
    queue().messages.push_back({record.level, std::string(record.module), std::string(record.message), now});
    queue().waiting = true;
    holds_gil = PyGILState_Check() != 0;
    if (!holds_gil && !queue().coming) deliver_from_a_thread();
  }
  if (!holds_gil) return;
  delivering = true;
  deliver_log();
  delivering = false;
}

}  // namespace

void deliver_log() noexcept {
  if (!queue().waiting) return;
  ++queue().delivering;
  const py::error_scope kept;  // an exception may be on its way
  try {
    std::vector<Message> messages;
    {
      const std::lock_guard lock(queue().mutex);
      messages.swap(queue().messages);
      queue().waiting = false;
    }
    for (const Message& message : messages) hand_over(message);
  } catch (const std::exception& error) {  // such as no memory for a text
    log_to_stderr(LogLevel::Error, std::string("the log could not be delivered: ") + error.what());
  }
  --queue().delivering;
}

void bind_base_log(py::module_& m) {
  m.def("log_level", [] { return std::string(name(log_level())); });
  m.def("check_log_level", [](const std::string& level) { parse_log_level(level); }, py::arg("level"));
  m.def("deliver_log", &deliver_log, "Hands over what threads without the GIL have logged.");
  m.def("set_log_level", [](const std::string& level) { set_log_level(parse_log_level(level)); }, py::arg("level"));
  m.def(
      "log_to_stderr",
      [](const std::string& level, const std::string& message) { log_to_stderr(parse_log_level(level), message); },
      py::arg("level"), py::arg("message"));
  m.def(
      "log",
      [](const std::string& level, const std::string& message, const std::string& module) {
        log(parse_log_level(level), message, module);
      },
      py::arg("level"), py::arg("message"), py::arg("module") = "");
  m.def(
      "log_elsewhere",
      [](const std::string& level, const std::string& message) {
        const LogLevel parsed = parse_log_level(level);
        std::thread([&] { log(parsed, message); }).join();
      },
      py::arg("level"), py::arg("message"),
      "By a thread that this one waits for, without giving up the GIL. For tests.");
  m.def(
      "send_log_to",
      [](const Receiver& receive) {
        queue().receive = receive;
        {
          const std::lock_guard lock(queue().mutex);
          queue().open = true;
        }
        set_log_sink(&enqueue);
      },
      py::arg("receive"), "Sends messages to receive(level, module, text, seconds since the epoch).");
  m.def(
      "end_log",
      [] {
        set_log_sink({});
        {
          const std::lock_guard lock(queue().mutex);
          queue().open = false;
        }
        deliver_log();
        // The end of the interpreter would tear a daemon thread out of Python through our frames.
        const py::gil_scoped_release others_go_on;
        for (int i = 0; i < kMostWaits && queue().delivering > 0; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      },
      "Sends messages to stderr from now on: the interpreter ends.");
}

}  // namespace oxytorch::bindings
