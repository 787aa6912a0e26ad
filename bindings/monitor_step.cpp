#include "monitor_step.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "oxytorch/error.h"
#include "oxytorch/logging.h"

namespace oxytorch::bindings {
namespace {

using monitor::PhaseId;
using monitor::ScalarId;

PyTypeObject* step_type = nullptr;
PyTypeObject* phase_type = nullptr;
PyTypeObject* scalar_type = nullptr;

struct StepObject {
  PyObject_HEAD std::shared_ptr<BoundMonitor> owner;
  std::int64_t samples;
};

struct NamedObject {  // Phase and Scalar
  PyObject_HEAD std::shared_ptr<BoundMonitor> owner;
  std::uint32_t id;
};

// Runs `call`; on an exception sets the Python error and returns null, as pybind11 does for its own functions.
template <class Call>
PyObject* translated(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    set_python_error(error);
    return nullptr;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

template <class Object>
monitor::PerformanceMonitor& monitor_of(PyObject* self) {
  return *reinterpret_cast<Object*>(self)->owner->monitor;
}

template <class Object>
void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Object*>(self)->owner.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

bool left_by_exception(PyObject* const* arguments, Py_ssize_t count) { return count > 0 && arguments[0] != Py_None; }

PyObject* step_prepare(PyObject* self, PyObject* samples) {
  const Py_ssize_t number = PyNumber_AsSsize_t(samples, PyExc_OverflowError);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  reinterpret_cast<StepObject*>(self)->samples = number;
  return Py_NewRef(self);
}

PyObject* step_enter(PyObject* self, PyObject*) {
  return translated([&] { monitor_of<StepObject>(self).begin_step(reinterpret_cast<StepObject*>(self)->samples); });
}

PyObject* step_exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  auto& monitor = monitor_of<StepObject>(self);
  if (left_by_exception(arguments, count)) {
    monitor.cancel_step();
    Py_RETURN_NONE;
  }
  return translated([&] { monitor.end_step(); });
}

PyObject* phase_enter(PyObject* self, PyObject*) {
  return translated(
      [&] { monitor_of<NamedObject>(self).begin_phase(PhaseId{reinterpret_cast<NamedObject*>(self)->id}); });
}

PyObject* phase_exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  auto& monitor = monitor_of<NamedObject>(self);
  const PhaseId id{reinterpret_cast<NamedObject*>(self)->id};
  if (left_by_exception(arguments, count)) {
    monitor.leave_phase(id);
    Py_RETURN_NONE;
  }
  return translated([&] { monitor.end_phase(id); });
}

// Reads a plain CPU tensor where it lies: no operator runs and nothing is waited for. False for any other tensor.
bool read_in_place(const at::Tensor& tensor, double& value) {
  const bool plain = tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_neg() &&
                     !tensor.unsafeGetTensorImpl()->key_set().has_any(c10::DispatchKeySet(
                         {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
                          c10::DispatchKey::FuncTorchGradWrapper})) &&
                     tensor.has_storage();
  if (!plain) return false;
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kFloat: value = *static_cast<const float*>(data); return true;
    case at::kDouble: value = *static_cast<const double*>(data); return true;
    case at::kBFloat16: value = static_cast<float>(*static_cast<const at::BFloat16*>(data)); return true;
    case at::kHalf: value = static_cast<float>(*static_cast<const at::Half*>(data)); return true;
    case at::kLong: value = static_cast<double>(*static_cast<const std::int64_t*>(data)); return true;
    case at::kInt: value = *static_cast<const std::int32_t*>(data); return true;
    case at::kBool: value = *static_cast<const bool*>(data) ? 1 : 0; return true;
    default: return false;
  }
}

void record_tensor(NamedObject& self, const at::Tensor& tensor) {
  OXY_CHECK(tensor.defined() && tensor.numel() == 1, InvalidArgument, "a scalar takes a tensor of one element; got ",
            tensor.defined() ? tensor.numel() : 0, ". Reduce it first, for example with .mean().");
  OXY_CHECK(!tensor.is_complex(), InvalidType, "a scalar takes a real tensor; got dtype ",
            c10::toString(tensor.scalar_type()), ".");
  const ScalarId id{self.id};
  double value = 0;
  if (read_in_place(tensor, value)) {
    self.owner->monitor->scalar(id, value);
  } else {
    self.owner->pending->push(self.owner->monitor->current_step(), id, tensor);
  }
}

PyObject* scalar_call(PyObject* self, PyObject* argument) {
  auto& object = *reinterpret_cast<NamedObject*>(self);
  const auto record = [&](double value) {
    return translated([&] { object.owner->monitor->scalar(ScalarId{object.id}, value); });
  };
  if (PyFloat_CheckExact(argument)) return record(PyFloat_AS_DOUBLE(argument));
  if (THPVariable_Check(argument)) {
    return translated([&] { record_tensor(object, THPVariable_Unpack(argument)); });
  }
  const double value = PyFloat_AsDouble(argument);
  if (value == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return record(value);
}

template <class Function>
PyCFunction as_c(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef step_methods[] = {
    {"prepare", step_prepare, METH_O,
     "prepare(self, samples: int) -> Step\n\nSet the samples of the next step; returns self."},
    {"__enter__", step_enter, METH_NOARGS, "__enter__(self) -> None\n\nBegin the step."},
    {"__exit__", as_c(step_exit), METH_FASTCALL, "__exit__(self, *exception: object) -> None\n\nEnd the step."},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef phase_methods[] = {
    {"__enter__", phase_enter, METH_NOARGS, "__enter__(self) -> None\n\nBegin the phase."},
    {"__exit__", as_c(phase_exit), METH_FASTCALL, "__exit__(self, *exception: object) -> None\n\nEnd the phase."},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef scalar_methods[] = {{"record", scalar_call, METH_O,
                                 "record(self, value: object) -> None\n\nRecord a number or a tensor of one element."},
                                {nullptr, nullptr, 0, nullptr}};

template <class Object>
PyTypeObject* make_type(py::module_& m, const char* full_name, const char* name, const char* doc,
                        PyMethodDef* methods) {
  std::vector<PyType_Slot> slots{{Py_tp_dealloc, reinterpret_cast<void*>(&deallocate<Object>)},
                                 {Py_tp_methods, methods},
                                 {Py_tp_doc, const_cast<char*>(doc)},
                                 {0, nullptr}};
  PyType_Spec spec{full_name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots.data()};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr(name) = type;
  return reinterpret_cast<PyTypeObject*>(type.release().ptr());
}

template <class Object>
std::pair<py::object, Object*> make(PyTypeObject* type, const std::shared_ptr<BoundMonitor>& owner) {
  auto object = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!object) throw py::error_already_set();
  auto* raw = reinterpret_cast<Object*>(object.ptr());
  new (&raw->owner) std::shared_ptr<BoundMonitor>(owner);
  return {std::move(object), raw};
}

}  // namespace

void PendingTensors::push(std::uint64_t step, monitor::ScalarId id, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  at::Tensor copy = value.detach().clone();
  const c10::impl::VirtualGuardImpl device(copy.device().type());
  if (entries_.size() == kCapacity) {
    entries_.pop_front();
    ++lost_;
    log_once(
        LogLevel::Warn, "monitor.pending_tensors",
        "a monitor holds more unread device scalars than it keeps; the oldest are lost. Call flush() now and then, or "
        "give it a sink.",
        "monitor");
  }
  entries_.push_back({step, id, std::move(copy), device.getStream(value.device())});
}

void PendingTensors::collect(std::vector<monitor::LateScalar>& values) {
  std::deque<Entry> entries;
  {
    const py::gil_scoped_acquire gil;
    entries.swap(entries_);
  }
  const at::NoGradGuard no_grad;
  const c10::Stream* waited = nullptr;
  for (const Entry& entry : entries) {
    if (waited == nullptr || *waited != entry.stream) {
      entry.stream.synchronize();
      waited = &entry.stream;
    }
    values.push_back({entry.step, entry.id, entry.value.item().toDouble()});
  }
}

BoundMonitor::BoundMonitor(const monitor::MonitorOptions& options, std::vector<std::shared_ptr<monitor::Sink>> sinks)
    : monitor(std::make_unique<monitor::PerformanceMonitor>(options, std::move(sinks))) {
  monitor->set_late_source([pending = pending](std::vector<monitor::LateScalar>& values) { pending->collect(values); });
}

// The last drain may call into Python, and the thread it waits for may be doing so.
BoundMonitor::~BoundMonitor() {
  if (PyGILState_Check() != 0) {
    const py::gil_scoped_release release;
    monitor.reset();
  }
}

void add_step_types(py::module_& m) {
  step_type = make_type<StepObject>(m, "oxytorch._C.monitor.Step", "Step", "A context manager: one training step.",
                                    step_methods);
  phase_type = make_type<NamedObject>(m, "oxytorch._C.monitor.Phase", "Phase",
                                      "A context manager: one phase of a step.", phase_methods);
  scalar_type =
      make_type<NamedObject>(m, "oxytorch._C.monitor.Scalar", "Scalar", "A named value of each step.", scalar_methods);
}

py::object make_step(const std::shared_ptr<BoundMonitor>& monitor) {
  auto [object, raw] = make<StepObject>(step_type, monitor);
  raw->samples = 0;
  return object;
}

py::object make_phase(const std::shared_ptr<BoundMonitor>& monitor, const std::string& name) {
  const PhaseId id = monitor->monitor->phase(name);
  auto [object, raw] = make<NamedObject>(phase_type, monitor);
  raw->id = static_cast<std::uint32_t>(id);
  return object;
}

py::object make_scalar(const std::shared_ptr<BoundMonitor>& monitor, const std::string& name) {
  const ScalarId id = monitor->monitor->scalar(name);
  auto [object, raw] = make<NamedObject>(scalar_type, monitor);
  raw->id = static_cast<std::uint32_t>(id);
  return object;
}

}  // namespace oxytorch::bindings
