#include "oxytorch/optim.h"

#include <optional>

#include "bindings.h"

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
  if (algorithm == Algorithm::SGD) {
    o.momentum = number(group, "momentum", 0);
    o.dampening = number(group, "dampening", 0);
    o.nesterov = truth(group, "nesterov");
    return o;
  }
  if (PyObject* betas = item(group, "betas"); betas != nullptr) {
    const auto pair = py::cast<std::pair<double, double>>(py::reinterpret_borrow<py::object>(betas));
    o.beta1 = pair.first;
    o.beta2 = pair.second;
  }
  o.eps = number(group, "eps", o.eps);
  o.amsgrad = truth(group, "amsgrad");
  o.decoupled_weight_decay = truth(group, "decoupled_weight_decay");
  return o;
}

bool same(const GroupOptions& a, const GroupOptions& b) {
  return a.lr == b.lr && a.lr_tensor.is_same(b.lr_tensor) && a.beta1 == b.beta1 && a.beta2 == b.beta2 &&
         a.eps == b.eps && a.weight_decay == b.weight_decay && a.momentum == b.momentum && a.dampening == b.dampening &&
         a.nesterov == b.nesterov && a.decoupled_weight_decay == b.decoupled_weight_decay && a.amsgrad == b.amsgrad &&
         a.maximize == b.maximize;
}

// The tail behind a torch.optim.Optimizer written in Python. Parameters are handed over once; each step reads the
// hyperparameters from `param_groups`, where schedulers write them.
class PythonTail {
 public:
  PythonTail(const std::string& algorithm, double clip_norm, double ema_decay, const std::string& nonfinite,
             bool collect_stats, bool zero_grads, bool force_composite)
      : algorithm_(algorithm == "sgd" ? Algorithm::SGD : Algorithm::Adam),
        tail_(algorithm_,
              {clip_norm, ema_decay, optim::parse_nonfinite(nonfinite), collect_stats, zero_grads, force_composite}) {}

  void add_group(const py::dict& group) {
    std::vector<at::Tensor> params;
    py::list held;
    for (const py::handle p : group["params"]) {
      params.push_back(py::cast<at::Tensor>(p));
      held.append(p);
    }
    std::vector<std::string> names;
    if (group.contains("param_names")) names = py::cast<std::vector<std::string>>(group["param_names"]);
    const GroupOptions options = read_group(algorithm_, group.ptr());
    tail_.add_group(std::move(params), std::move(names), options);
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

  bool step(const py::list& groups, const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf) {
    for (std::size_t i = 0; i < options_.size(); ++i) {
      const GroupOptions now = read_group(algorithm_, PyList_GET_ITEM(groups.ptr(), i));
      if (same(now, options_[i])) continue;
      tail_.set_group_options(i, now);
      options_[i] = now;
    }
    const py::gil_scoped_release release;
    return tail_.step(grad_scale.value_or(at::Tensor()), found_inf.value_or(at::Tensor()));
  }

  py::dict state(std::size_t index) const {
    const ParamState& s = tail_.state(index);
    py::dict result;
    const auto put = [&](const char* key, const at::Tensor& t) {
      if (t.defined()) result[key] = t;
    };
    put("step", s.step);
    put("exp_avg", s.exp_avg);
    put("exp_avg_sq", s.exp_avg_sq);
    put("max_exp_avg_sq", s.max_exp_avg_sq);
    put("momentum_buffer", s.momentum_buffer);
    return result;
  }

  void set_state(std::size_t index, const py::dict& state, const std::optional<at::Tensor>& ema) {
    const auto get = [&](const char* key) {
      return state.contains(key) && !state[key].is_none() ? py::cast<at::Tensor>(state[key]) : at::Tensor();
    };
    tail_.set_state(index, {get("step"), get("exp_avg"), get("exp_avg_sq"), get("max_exp_avg_sq"),
                            get("momentum_buffer"), ema.value_or(at::Tensor())});
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
    put("skipped", s.skipped);
    put("grad_norms", s.grad_norms);
    put("param_norms", s.param_norms);
    put("update_norms", s.update_norms);
    return result;
  }

  StepTail& tail() { return tail_; }
  const StepTail& tail() const { return tail_; }

 private:
  Algorithm algorithm_;
  StepTail tail_;
  std::vector<GroupOptions> options_;
  py::list held_;
};

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<PythonTail>(m, "StepTail", "Everything after backward as one native call; see oxytorch.optim.")
      .def(py::init<const std::string&, double, double, const std::string&, bool, bool, bool>(), py::arg("algorithm"),
           py::kw_only(), py::arg("clip_norm"), py::arg("ema_decay"), py::arg("nonfinite"), py::arg("collect_stats"),
           py::arg("zero_grads"), py::arg("force_composite"))
      .def("add_group", &PythonTail::add_group, py::arg("group"))
      .def("matches", &PythonTail::matches, py::arg("param_groups"))
      .def("step", &PythonTail::step, py::arg("param_groups"), py::arg("grad_scale"), py::arg("found_inf"))
      .def("state", &PythonTail::state, py::arg("index"))
      .def("set_state", &PythonTail::set_state, py::arg("index"), py::arg("state"), py::arg("ema"))
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
