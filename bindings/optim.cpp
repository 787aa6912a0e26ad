#include "oxytorch/optim.h"

#include <ATen/record_function.h>

#include <optional>
#include <vector>

#include "bindings.h"
#include "shown_state.h"

namespace oxytorch::bindings {
namespace {

using optim::Algorithm;
using optim::GroupOptions;
using optim::ParamState;
using optim::StepTail;

// A value of a parameter group: borrowed, null if the key is missing.
PyObject* item(PyObject* group, const char* key) { return PyDict_GetItemString(group, key); }

double number(PyObject* group, const char* key, double fallback) {
  PyObject* value = item(group, key);
  if (value == nullptr || value == Py_None) return fallback;
  const double result = PyFloat_AsDouble(value);
  if (result == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

bool truth(PyObject* group, const char* key) {
  PyObject* value = item(group, key);
  return value != nullptr && PyObject_IsTrue(value) == 1;
}

// "adam", "sgd", ... as the Python classes call their algorithm.
Algorithm parse_algorithm(const std::string& text) {
  constexpr std::pair<const char*, Algorithm> kNames[] = {
      {"adam", Algorithm::Adam},       {"sgd", Algorithm::SGD},         {"lion", Algorithm::Lion},
      {"adagrad", Algorithm::Adagrad}, {"rmsprop", Algorithm::RMSprop}, {"muon", Algorithm::Muon}};
  for (const auto& [known, algorithm] : kNames) {
    if (text == known) return algorithm;
  }
  throw py::value_error("unknown algorithm '" + text + "'.");
}

template <class T>
T value(PyObject* group, const char* key, T fallback) {
  PyObject* found = item(group, key);
  if (found == nullptr || found == Py_None) return fallback;
  return py::cast<T>(py::reinterpret_borrow<py::object>(found));
}

GroupOptions read_group(Algorithm algorithm, PyObject* group) {
  GroupOptions o;
  PyObject* lr = item(group, "lr");
  if (lr != nullptr && THPVariable_Check(lr)) {
    o.lr_tensor = THPVariable_Unpack(lr);
  } else {
    o.lr = number(group, "lr", o.lr);
  }
  o.weight_decay = number(group, "weight_decay", 0);
  o.maximize = truth(group, "maximize");
  if (algorithm != Algorithm::SGD && algorithm != Algorithm::Lion) o.eps = number(group, "eps", o.eps);
  switch (algorithm) {
    case Algorithm::Adam:
      o.amsgrad = truth(group, "amsgrad");
      o.decoupled_weight_decay = truth(group, "decoupled_weight_decay");
      [[fallthrough]];
    case Algorithm::Lion: std::tie(o.beta1, o.beta2) = value(group, "betas", std::pair(o.beta1, o.beta2)); break;
    case Algorithm::SGD:
      o.momentum = number(group, "momentum", 0);
      o.dampening = number(group, "dampening", 0);
      o.nesterov = truth(group, "nesterov");
      break;
    case Algorithm::Adagrad:
      o.lr_decay = number(group, "lr_decay", 0);
      o.initial_accumulator_value = number(group, "initial_accumulator_value", 0);
      break;
    case Algorithm::RMSprop:
      o.alpha = number(group, "alpha", o.alpha);
      o.momentum = number(group, "momentum", 0);
      o.centered = truth(group, "centered");
      break;
    case Algorithm::Muon:
      o.momentum = number(group, "momentum", 0);
      o.nesterov = truth(group, "nesterov");
      o.ns_coefficients = value(group, "ns_coefficients", o.ns_coefficients);
      o.ns_steps = value(group, "ns_steps", o.ns_steps);
      o.adjust_lr = value<std::string>(group, "adjust_lr_fn", "original") == "match_rms_adamw"
                        ? optim::AdjustLr::MatchRmsAdamW
                        : optim::AdjustLr::Original;
      break;
  }
  return o;
}

optim::TailOptions read_options(const py::dict& given) {
  optim::TailOptions o;
  PyObject* d = given.ptr();
  o.clip_norm = number(d, "clip_norm", 0);
  o.clip_value = number(d, "clip_value", 0);
  o.agc = number(d, "agc", 0);
  o.agc_eps = number(d, "agc_eps", o.agc_eps);
  o.ema_decay = number(d, "ema_decay", 0);
  o.nonfinite = optim::parse_nonfinite(value<std::string>(d, "nonfinite", "skip"));
  o.state_dtype = optim::parse_state_format(value<std::string>(d, "state_dtype", "auto"));
  o.master_weights = optim::parse_master_format(value<std::string>(d, "master_weights", "none"));
  if (PyObject* copy = item(d, "copy_dtype"); copy != nullptr && copy != Py_None) {
    o.copy_dtype = py::cast<at::ScalarType>(py::reinterpret_borrow<py::object>(copy));
  }
  o.stochastic_rounding = truth(d, "stochastic_rounding");
  o.seed = value<std::uint64_t>(d, "seed", 0);
  o.collect_stats = truth(d, "collect_stats");
  o.zero_grads = truth(d, "zero_grads");
  o.norm_in_backward = truth(d, "norm_in_backward");
  o.step_in_backward = truth(d, "step_in_backward");
  o.force_composite = truth(d, "force_composite");
  return o;
}

// The tail behind a torch.optim.Optimizer written in Python. Parameters are handed over once; each step reads the
// hyperparameters from `param_groups`, where schedulers write them.
class PythonTail {
 public:
  PythonTail(const std::string& algorithm, const py::dict& options)
      : algorithm_(parse_algorithm(algorithm)), tail_(algorithm_, read_options(options)) {}

  // `tensors`: what is updated for group["params"], one for each.
  void add_group(const py::dict& group, std::vector<at::Tensor> tensors) {
    py::list held;
    for (const py::handle p : group["params"]) held.append(p);
    std::vector<std::string> names;
    if (group.contains("param_names")) names = py::cast<std::vector<std::string>>(group["param_names"]);
    const GroupOptions options = read_group(algorithm_, group.ptr());
    tail_.add_group(std::move(tensors), std::move(names), options);
    options_.push_back(options);
    held_.append(held);
  }

  // False where the groups no longer hold the very parameters that were handed over.
  bool matches(const py::list& groups) const {
    if (groups.size() != held_.size()) return false;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      PyObject* now = item(PyList_GET_ITEM(groups.ptr(), i), "params");
      PyObject* then = PyList_GET_ITEM(held_.ptr(), i);
      if (now == nullptr || !PyList_Check(now) || PyList_GET_SIZE(now) != PyList_GET_SIZE(then)) return false;
      for (Py_ssize_t j = 0; j < PyList_GET_SIZE(now); ++j) {
        if (PyList_GET_ITEM(now, j) != PyList_GET_ITEM(then, j)) return false;
      }
    }
    return true;
  }

  // torch's `state` as it is now shows what the tail holds.
  void remember(const py::object& state) { shown_.remember(state); }
  bool holds(const py::object& state) { return shown_.is(state); }
  bool holds_of(const py::object& state, const py::object& param) const { return shown_.is(state, param); }

  bool step(const py::list& groups, const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& skip,
            const std::optional<at::Tensor>& norm_limit, double grad_divisor) {
    read_groups(groups);
    const auto given = [](const std::optional<at::Tensor>& t) { return t.value_or(at::Tensor()); };
    const py::gil_scoped_release release;
    return tail_.step({given(grad_scale), given(found_inf), given(skip), given(norm_limit), grad_divisor});
  }

  bool grad_ready(std::size_t index, const py::list& groups, double grad_divisor) {
    if (tail_.options().step_in_backward) read_groups(groups);
    const py::gil_scoped_release release;
    return tail_.grad_ready(index, grad_divisor);
  }

  void set_norm_reducer(const py::function& reducer) {
    tail_.set_norm_reducer([reducer](const at::Tensor& sums) {
      const py::gil_scoped_acquire acquire;
      return py::cast<at::Tensor>(reducer(sums));
    });
  }

  // 8-bit codes that somebody laid out anew return to the order of their scales: what is shown next can be copied.
  void order_codes() const {
    for (std::size_t i = 0; i < tail_.param_count(); ++i) static_cast<void>(tail_.state(i));
  }

  // torch's names; `step` comes first, as torch makes it.
  py::dict state(std::size_t index) const { return named(tail_.state(index)); }
  py::dict decoded_state(std::size_t index) const { return named(tail_.decoded_state(index)); }

  py::dict named(const ParamState& s) const {
    py::dict result;
    const auto put = [&](const std::string& key, const at::Tensor& t) {
      if (t.defined()) result[key.c_str()] = t;
    };
    put("step", s.step);
    const auto names = optim::moment_names(algorithm_);
    for (std::size_t k = 0; k < names.size(); ++k) {
      if (names[k] == nullptr) continue;
      put(names[k], s.moments[k]);
      put(names[k] + std::string("_scale"), s.scales[k]);
    }
    put("master", s.master);
    put("low_bits", s.low_bits);
    return result;
  }

  void set_state(std::size_t index, const py::dict& state, const std::optional<at::Tensor>& ema,
                 const std::optional<at::Tensor>& copy) {
    const auto get = [&](const std::string& key) {
      const py::str name(key);
      return state.contains(name) && !state[name].is_none() ? py::cast<at::Tensor>(state[name]) : at::Tensor();
    };
    ParamState s;
    s.step = get("step");
    const auto names = optim::moment_names(algorithm_);
    for (std::size_t k = 0; k < names.size(); ++k) {
      if (names[k] == nullptr) continue;
      s.moments[k] = get(names[k]);
      s.scales[k] = get(names[k] + std::string("_scale"));
    }
    s.master = get("master");
    s.low_bits = get("low_bits");
    s.ema = ema.value_or(at::Tensor());
    s.copy = copy.value_or(at::Tensor());
    tail_.set_state(index, std::move(s));
  }

  std::optional<at::Tensor> copy(std::size_t index) const {
    const at::Tensor& copy = tail_.state(index).copy;
    return copy.defined() ? std::optional(copy) : std::nullopt;
  }

  std::optional<at::Tensor> ema(std::size_t index) const {
    const at::Tensor& average = tail_.state(index).ema;
    return average.defined() ? std::optional(average) : std::nullopt;
  }

  py::dict stats() const {
    const optim::TailStats& s = tail_.stats();
    py::dict result;
    const auto put = [&](const char* key, const at::Tensor& t) {
      if (t.defined()) result[key] = t;
    };
    put("grad_norm", s.grad_norm);
    put("found_inf", s.found_inf);
    put("applied", s.applied);
    put("skipped", s.skipped);
    put("grad_norms", s.grad_norms);
    put("param_norms", s.param_norms);
    put("update_norms", s.update_norms);
    return result;
  }

  StepTail& tail() { return tail_; }
  const StepTail& tail() const { return tail_; }

 private:
  void read_groups(const py::list& groups) {
    for (std::size_t i = 0; i < options_.size(); ++i) {
      const GroupOptions now = read_group(algorithm_, PyList_GET_ITEM(groups.ptr(), i));
      if (now == options_[i]) continue;
      tail_.set_group_options(i, now);
      options_[i] = now;
    }
  }

  Algorithm algorithm_;
  StepTail tail_;
  std::vector<GroupOptions> options_;
  py::list held_;
  ShownState shown_;
};

bool is_plain(PyObject* param) { return THPVariable_CheckTypeExact(Py_TYPE(param)); }

// Not where a profiler would show it, or where the parameter is of a class that has its own idea of a gradient.
bool clear_gradients(const py::list& groups) {
  if (at::hasCallbacks()) return false;
  std::vector<PyObject*> params;
  for (const py::handle group : groups) {
    for (const py::handle param : py::cast<py::sequence>(group["params"])) {
      if (!is_plain(param.ptr())) return false;
      params.push_back(param.ptr());
    }
  }
  for (PyObject* param : params) {
    const at::Tensor& tensor = THPVariable_Unpack(param);
    if (tensor.grad().defined()) tensor.mutable_grad().reset();
  }
  return true;
}

}  // namespace

void bind_optim(py::module_& m) {
  m.def("is_recording", &at::hasCallbacks, "Whether a profiler or another observer sees ranges of this thread.");
  m.def("clear_gradients", &clear_gradients, py::arg("param_groups"),
        "Sets the gradients of all parameters to None; False, with nothing done, where torch's own zero_grad has to.");
  py::class_<PythonTail>(m, "StepTail", "Everything after backward as one native call; see oxytorch.optim.")
      .def(py::init<const std::string&, const py::dict&>(), py::arg("algorithm"), py::arg("options"))
      .def("add_group", &PythonTail::add_group, py::arg("group"), py::arg("tensors"))
      .def("matches", &PythonTail::matches, py::arg("param_groups"))
      .def("remember", &PythonTail::remember, py::arg("state"))
      .def("holds", &PythonTail::holds, py::arg("state"))
      .def("holds_of", &PythonTail::holds_of, py::arg("state"), py::arg("param"))
      .def("step", &PythonTail::step, py::arg("param_groups"), py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("skip"), py::arg("norm_limit"), py::arg("grad_divisor"))
      .def("grad_ready", &PythonTail::grad_ready, py::arg("index"), py::arg("param_groups"), py::arg("grad_divisor"))
      .def("set_norm_reducer", &PythonTail::set_norm_reducer, py::arg("reducer"))
      .def("state", &PythonTail::state, py::arg("index"))
      .def("order_codes", &PythonTail::order_codes)
      .def("decoded_state", &PythonTail::decoded_state, py::arg("index"))
      .def("set_state", &PythonTail::set_state, py::arg("index"), py::arg("state"), py::arg("ema"), py::arg("copy"))
      .def("copy", &PythonTail::copy, py::arg("index"))
      .def("ema", &PythonTail::ema, py::arg("index"))
      .def("stats", &PythonTail::stats)
      .def(
          "apply_ema", [](PythonTail& self) { self.tail().apply_ema(); }, release_gil())
      .def(
          "restore_parameters", [](PythonTail& self) { self.tail().restore_parameters(); }, release_gil())
      .def_property_readonly("param_count", [](const PythonTail& self) { return self.tail().param_count(); })
      .def_property_readonly("native", [](const PythonTail& self) { return self.tail().native(); })
      .def_property_readonly("bytes_per_step", [](const PythonTail& self) { return self.tail().bytes_per_step(); });
}

}  // namespace oxytorch::bindings
