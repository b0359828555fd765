// engine_outputs.hpp: a step's rows that go on, as outputs of the engine's own classes.
//
// A plugin keeps the engine's tasks up to date and hands out objects of the engine's classes. For a
// row that just goes on these are the same dozen attributes each time, so they are read and written
// here, in one call a step. Every other row (a first token, an end, anything unusual) is left to
// the caller, whose Python is also what tests compare this with.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "python_outputs.hpp"

namespace tp::python {

// An attribute that need not be there: nullptr where it is not.
[[nodiscard]] inline PyObject *optional_attribute(PyObject *of, const py::str &name) {
  PyObject *found = nullptr;
#if PY_VERSION_HEX >= 0x030d0000
  const int status = PyObject_GetOptionalAttr(of, name.ptr(), &found);
#else
  const int status = _PyObject_LookupAttr(of, name.ptr(), &found);
#endif
  if (status < 0)
    throw py::error_already_set();
  return found;
}

// A class whose objects are their __slots__ or their __dict__, and nothing else: a copy of one is a
// copy of those. Throws TypeError for any other class.
class PlainClass {
public:
  explicit PlainClass(PyTypeObject *type) : type_(type) {
    if (type->tp_dictoffset == 0) {
      slots_.emplace(type);
      return;
    }
    const bool is_dict_alone = PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) &&
                               type->tp_base == &PyBaseObject_Type &&
                               type->tp_new == PyBaseObject_Type.tp_new && type->tp_itemsize == 0 &&
                               Py_SIZE(reinterpret_cast<PyObject *>(type)) == 0;
    if (!is_dict_alone)
      throw py::type_error(std::string(type->tp_name) + " has more than a __dict__");
  }

  [[nodiscard]] PyTypeObject *type() const noexcept { return type_; }
  [[nodiscard]] const SlotClass *slots() const noexcept { return slots_ ? &*slots_ : nullptr; }

  // An object with this __dict__.
  [[nodiscard]] PyObject *of_dict(PyObject *dict) const {
    Made made(PyBaseObject_Type.tp_new(type_, no_arguments_.ptr(), nullptr));
    if (PyObject_GenericSetDict(made.get(), dict, nullptr) != 0)
      throw py::error_already_set();
    return made.give();
  }

  [[nodiscard]] PyObject *copy(PyObject *of) const {
    if (slots_)
      return slots_->copy(of);
    const Made dict(PyObject_GenericGetDict(of, nullptr));
    const Made copied(PyDict_Copy(dict.get()));
    return of_dict(copied.get());
  }

private:
  PyTypeObject *type_; // held by whoever holds us
  std::optional<SlotClass> slots_;
  py::tuple no_arguments_;
};

// An object of which copies are made that differ in N fields. Its empty lists are each copy's own;
// what else it holds nobody can change. Throws TypeError where that cannot be.
template <size_t N> class Prototype {
public:
  Prototype(py::object of, const std::array<const char *, N> &fields)
      : of_(std::move(of)), class_(Py_TYPE(of_.ptr())) {
    if (class_.slots() == nullptr)
      dict_ = py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(of_.ptr(), nullptr));
    for (size_t i = 0; i < N; ++i)
      names_[i] = interned(fields[i]);
    check_plain();
    if (class_.slots() != nullptr)
      for (size_t i = 0; i < N; ++i)
        offsets_[i] = class_.slots()->offset(fields[i]);
    const py::object all =
        dict_ ? py::object(dict_.attr("keys")()) : py::object(py::type::of(of_).attr("__slots__"));
    for (const py::handle name : all)
      look_at(py::reinterpret_borrow<py::str>(name));
  }

  // A copy with these fields. It is out of the collector's sight unless it `holds_containers` that
  // are the caller's, and may lead back to it.
  [[nodiscard]] PyObject *copy(std::array<Made, N> &values, bool holds_containers) const {
    return dict_ ? of_dict(values, holds_containers) : of_slots(values, holds_containers);
  }

private:
  // Throws where to set a field is more than to put it where it lies.
  void check_plain() const {
    PyTypeObject *const type = class_.type();
    if (type->tp_setattro != PyObject_GenericSetAttr)
      throw py::type_error(std::string(type->tp_name) + " has a __setattr__");
    for (const py::str &name : names_) {
      PyObject *const found = dict_ ? _PyType_Lookup(type, name.ptr()) : nullptr; // a borrowed one
      if (found != nullptr && Py_TYPE(found)->tp_descr_set != nullptr)
        throw py::type_error(std::string(type->tp_name) + "." + std::string(name) +
                             " is no attribute alone");
    }
  }

  void look_at(const py::str &name) {
    if (std::any_of(names_.begin(), names_.end(), [&](const py::str &f) { return f.equal(name); }))
      return;
    const py::object value = of_.attr(name);
    if (PyList_CheckExact(value.ptr()) && PyList_GET_SIZE(value.ptr()) == 0) {
      lists_.push_back(name);
      if (class_.slots() != nullptr)
        list_offsets_.push_back(class_.slots()->offset(std::string(name).c_str()));
    } else if (PyObject_IS_GC(value.ptr()))
      throw py::type_error(std::string(class_.type()->tp_name) + "." + std::string(name) +
                           " begins as a " + Py_TYPE(value.ptr())->tp_name);
  }

  [[nodiscard]] PyObject *of_slots(std::array<Made, N> &values, bool holds_containers) const {
    Made made(class_.slots()->copy(of_.ptr()));
    for (size_t i = 0; i < N; ++i)
      put_slot(made.get(), offsets_[i], values[i].give());
    for (const Py_ssize_t offset : list_offsets_)
      put_slot(made.get(), offset, untracked(PyList_New(0)));
    if (!holds_containers)
      PyObject_GC_UnTrack(made.get());
    return made.give();
  }

  [[nodiscard]] PyObject *of_dict(std::array<Made, N> &values, bool holds_containers) const {
    const Made dict(PyDict_Copy(dict_.ptr()));
    for (size_t i = 0; i < N; ++i)
      set(dict.get(), names_[i], values[i].get());
    for (const py::str &name : lists_)
      set(dict.get(), name, Made(untracked(PyList_New(0))).get());
    Made made(class_.of_dict(dict.get()));
    if (!holds_containers) {
      PyObject_GC_UnTrack(dict.get()); // a container that is put into it makes it seen again
      PyObject_GC_UnTrack(made.get());
    }
    return made.give();
  }

  static void set(PyObject *dict, const py::str &name, PyObject *value) {
    if (PyDict_SetItem(dict, name.ptr(), value) != 0)
      throw py::error_already_set();
  }

  py::object of_;
  PlainClass class_;
  py::dict dict_{py::reinterpret_steal<py::dict>(nullptr)};
  std::array<py::str, N> names_;
  std::array<Py_ssize_t, N> offsets_{};
  std::vector<py::str> lists_;
  std::vector<Py_ssize_t> list_offsets_;
};

// Makes the outputs of the rows of a step that go on.
class StepMaker {
public:
  // `output`, `completion`: what every output begins as. `logprobs_lists`: a tuple of three.
  // `life`: the class of the lives, see rows.py. Throws TypeError or AttributeError where one of
  // them is of a kind that cannot be made here.
  StepMaker(const py::object &output, const py::object &completion, py::type logprobs_lists,
            py::type life, bool is_decode)
      : output_(output,
                {"request_id", "outputs", "metrics", "prompt_token_ids_len", "num_cached_tokens",
                 "ic_req_data", "output_type", "num_input_image_tokens", "num_input_video_tokens"}),
        completion_(completion, {"index", "send_idx", "token_ids", "logprob", "top_logprobs"}),
        target_(output.attr("output_type")), num_images_(output.attr("num_input_image_tokens")),
        num_videos_(output.attr("num_input_video_tokens")),
        lists_holder_(std::move(logprobs_lists)), lists_(tuple_class(lists_holder_)),
        life_holder_(std::move(life)), life_(as_type(life_holder_)), is_decode_(is_decode) {}

  // What a step has come to. Rows are numbers of the batch's rows.
  struct Told {
    py::list outputs;                                       // [n], None where there is none
    std::vector<py::ssize_t> left;                          // rows that were not touched
    std::vector<std::pair<py::ssize_t, py::object>> broken; // rows, and what went wrong with them
    std::vector<double> gaps;                // seconds a token since the row's last output
    std::vector<int64_t> gap_counts, counts; // tokens of a gap; of a row
    int64_t num_tokens = 0, num_decode_tokens = 0;
  };

  // `columns`: (row, generation, finish_reason, token_offsets, token_ids). `candidates`: None or
  // those of the tokens. `current`: the life of each of the engine's rows. `stop_flags`: the
  // manager's. `shielded`: ids whose outputs nobody wants. `tokens_counter`: tokens of each id.
  // `output_type`: None where it is the class's own.
  [[nodiscard]] Told make(const py::tuple &columns, const py::object &candidates,
                          const py::list &current, const py::list &stop_flags,
                          const py::frozenset &shielded, const py::dict &tokens_counter,
                          const py::object &output_type, double now, bool counts_decode) {
    const auto row = column_of<uint32_t>(columns[0], "row"),
               generation = column_of<uint32_t>(columns[1], "generation");
    const auto reason = column_of<uint8_t>(columns[2], "finish_reason");
    const auto tokens = column_of<int32_t>(columns[4], "token_ids");
    const Offsets offsets(columns[3], tokens.size());
    const auto n = row.size();
    for (const py::ssize_t size : {generation.size(), reason.size(), offsets.num_rows()})
      if (size != n)
        throw py::value_error("the batch's columns are of different sizes");
    const auto own = candidates.is_none() ? nullptr : std::make_unique<Candidates>(candidates);
    Told told;
    Made outputs(PyList_New(n));
    const py::float_ now_object(now);
    const Step step{tokens.data(),
                    own.get(),
                    shielded.ptr(),
                    tokens_counter.ptr(),
                    output_type.is_none() ? target_.ptr() : output_type.ptr(),
                    now_object.ptr(),
                    counts_decode,
                    &told};
    for (py::ssize_t i = 0; i < n; ++i) {
      PyObject *made = nullptr;
      try {
        const uint32_t at = row.data()[i];
        const auto life = py::reinterpret_steal<py::object>(
            reason.data()[i] == TP_FINISH_NONE
                ? life_of(current.ptr(), stop_flags.ptr(), at, generation.data()[i])
                : nullptr);
        if (life)
          made = output_of(step, life.ptr(), at, i, offsets.of(i));
        if (made == nullptr)
          told.left.push_back(i);
      } catch (py::error_already_set &error) {
        told.broken.emplace_back(i, py::reinterpret_borrow<py::object>(error.value()));
      } catch (const std::exception &error) {
        told.broken.emplace_back(i, py::str(error.what()));
      }
      PyList_SET_ITEM(outputs.get(), i, made != nullptr ? made : Py_NewRef(Py_None));
    }
    told.outputs = py::reinterpret_steal<py::list>(outputs.give());
    return told;
  }

private:
  struct Step {
    const int32_t *tokens;
    const Candidates *candidates;
    PyObject *shielded, *tokens_counter, *output_type, *now;
    bool counts_decode;
    Told *told;
  };

  static void check(int status) {
    if (status < 0)
      throw py::error_already_set();
  }

  // The life of a row, where it is the one of this generation and goes on; else nullptr.
  [[nodiscard]] PyObject *life_of(PyObject *current, PyObject *stop_flags, uint32_t row,
                                  uint32_t generation) const {
    if (row >= PyList_GET_SIZE(current) || row >= PyList_GET_SIZE(stop_flags))
      return nullptr;
    PyObject *const life = PyList_GET_ITEM(current, row);
    if (Py_TYPE(life) != life_.type() || is_true(PyList_GET_ITEM(stop_flags, row)) ||
        is_true(slot(life, is_over_)) || is_true(slot(life, prompt_pieces_)))
      return nullptr;
    const unsigned long own = PyLong_AsUnsignedLong(slot(life, generation_));
    if (PyErr_Occurred() != nullptr)
      throw py::error_already_set();
    return own == generation ? Py_NewRef(life) : nullptr;
  }

  // The output of one row; nullptr, and nothing touched, where it is left to the caller.
  [[nodiscard]] PyObject *output_of(const Step &step, PyObject *life, uint32_t row, py::ssize_t i,
                                    Offsets::Part part) {
    if (part.count == 0)
      return nullptr;
    const Made task(Py_NewRef(slot(life, task_)));
    PyObject *const t = task.get();
    Made request_id(attribute(t, names_.request_id));
    const int is_shielded = PySet_Contains(step.shielded, request_id.get());
    check(is_shielded);
    PyObject *const known = PyDict_GetItemWithError(step.tokens_counter, request_id.get());
    if (known == nullptr && PyErr_Occurred() != nullptr)
      throw py::error_already_set();
    if (known != nullptr && !PyLong_Check(known))
      return nullptr;
    const int64_t before = known == nullptr ? 0 : PyLong_AsLongLong(known);
    if (PyErr_Occurred() != nullptr)
      throw py::error_already_set();
    const bool is_special = is_shielded != 0 || before < 1 || (before == 1 && is_decode_);
    if (is_special || has(t, names_.prefill_chunk_info) || has(t, names_.multimodal_inputs))
      return nullptr;
    const Made metrics(attribute(t, names_.metrics));
    if (!knows(Py_TYPE(metrics.get())))
      return nullptr;
    Made sent(PyLong_FromLongLong(before));
    stamp(step, t, metrics.get(), request_id.get(), before, part.count);
    take_tokens(t, step.tokens + part.begin, part.count);
    Made copied(metrics_->copy(metrics.get()));
    PyObject_GC_UnTrack(copied.get()); // it holds numbers

    Made lists(step.candidates != nullptr ? step.candidates->lists_of(i, lists_)
                                          : Py_NewRef(Py_None));
    Made logprob(Py_NewRef(step.candidates != nullptr ? logprob_of_last(lists.get()) : Py_None));
    std::array<Made, 5> of_completion{Made(PyLong_FromUnsignedLong(row)), Made(sent.give()),
                                      Made(list_of(step.tokens + part.begin, part.count)),
                                      Made(logprob.give()), Made(lists.give())};
    Made data(attribute(t, names_.ic_req_data));
    const bool holds_containers = PyObject_IS_GC(data.get());
    std::array<Made, 9> of_output{Made(request_id.give()),
                                  Made(completion_.copy(of_completion, false)),
                                  Made(copied.give()),
                                  Made(attribute(t, names_.prompt_token_ids_len)),
                                  Made(attribute(t, names_.num_cached_tokens)),
                                  Made(data.give()),
                                  Made(Py_NewRef(step.output_type)),
                                  Made(Py_NewRef(num_images_.ptr())),
                                  Made(Py_NewRef(num_videos_.ptr()))};
    return output_.copy(of_output, holds_containers);
  }

  [[nodiscard]] static bool has(PyObject *of, const py::str &name) {
    PyObject *const found = optional_attribute(of, name);
    return found != nullptr && is_true(Made(found).get());
  }

  // Whether metrics of this class can be copied here.
  [[nodiscard]] bool knows(PyTypeObject *type) {
    if (looked_at_.ptr() != reinterpret_cast<PyObject *>(type)) {
      looked_at_ = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject *>(type));
      metrics_.reset();
      try {
        metrics_.emplace(type);
      } catch (const py::type_error &) {
        return false; // the caller copies it
      }
    }
    return metrics_.has_value();
  }

  // Notes `count` tokens behind `before` in the task, and for the step.
  void stamp(const Step &step, PyObject *task, PyObject *metrics, PyObject *request_id,
             int64_t before, int64_t count) const {
    const Made done(PyObject_CallMethodNoArgs(metrics, names_.record_recv_token.ptr()));
    Told &told = *step.told;
    if (PyObject *const found = optional_attribute(task, names_.last_token_time)) {
      const Made last(found);
      if (last.get() != Py_None) {
        const double then = PyFloat_AsDouble(last.get());
        if (PyErr_Occurred() != nullptr)
          throw py::error_already_set();
        told.gaps.push_back((PyFloat_AS_DOUBLE(step.now) - then) / static_cast<double>(count));
        told.gap_counts.push_back(count);
      }
    }
    check(PyObject_SetAttr(task, names_.last_token_time.ptr(), step.now));
    const Made after(PyLong_FromLongLong(before + count));
    check(PyDict_SetItem(step.tokens_counter, request_id, after.get()));
    told.num_tokens += count;
    told.counts.push_back(count);
    if (step.counts_decode && is_decoding(task))
      told.num_decode_tokens += count;
  }

  [[nodiscard]] bool is_decoding(PyObject *task) const {
    const Made needed(attribute(task, names_.need_prefill_tokens));
    if (needed.get() == Py_None)
      return false;
    const Made computed(attribute(task, names_.num_computed_tokens));
    const int is_past = PyObject_RichCompareBool(computed.get(), needed.get(), Py_GE);
    check(is_past);
    return is_past != 0;
  }

  // Adds tokens to those of the task.
  void take_tokens(PyObject *task, const int32_t *tokens, py::ssize_t count) const {
    const Made all(attribute(task, names_.output_token_ids));
    if (!PyList_CheckExact(all.get())) {
      const Made added(list_of(tokens, count));
      const Made done(PyObject_CallMethodOneArg(all.get(), names_.extend.ptr(), added.get()));
      return;
    }
    for (py::ssize_t j = 0; j < count; ++j) {
      const Made token(PyLong_FromLong(tokens[j]));
      check(PyList_Append(all.get(), token.get()));
    }
  }

  struct Names {
    py::str request_id = interned("request_id"), metrics = interned("metrics"),
            ic_req_data = interned("ic_req_data"),
            multimodal_inputs = interned("multimodal_inputs"),
            prefill_chunk_info = interned("prefill_chunk_info"),
            prompt_token_ids_len = interned("prompt_token_ids_len"),
            num_cached_tokens = interned("num_cached_tokens"),
            last_token_time = interned("last_token_time"),
            need_prefill_tokens = interned("need_prefill_tokens"),
            num_computed_tokens = interned("num_computed_tokens"),
            output_token_ids = interned("output_token_ids"), extend = interned("extend"),
            record_recv_token = interned("record_recv_token");
  };

  const Prototype<9> output_;
  const Prototype<5> completion_;
  const py::object target_, num_images_, num_videos_;
  const py::type lists_holder_;
  PyTypeObject *const lists_;
  const py::type life_holder_;
  const SlotClass life_;
  const bool is_decode_;
  const Py_ssize_t task_ = life_.offset("task"), generation_ = life_.offset("generation"),
                   is_over_ = life_.offset("is_over"),
                   prompt_pieces_ = life_.offset("prompt_pieces");
  const Names names_;
  py::object looked_at_; // the class of metrics that metrics_ is about
  std::optional<PlainClass> metrics_;
};

} // namespace tp::python
