// python_outputs.hpp: the Python objects of a whole batch, made in one call. An object is a copy of
// a prototype in which the slots are set that differ; so it costs no call of Python per row.
//
// What may be shared between objects are values that nobody can change: None, numbers, strings.
// Every list and every metrics is one output's own, since its reader may write into it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <memory>
#include <string>
#include <utility>

#include "layout.h"

namespace tp::python {

namespace py = pybind11;

// A reference of our own to an object that was made just now; throws where it could not be made.
// (py::object checks the GIL at each step where asserts are on, as here.)
class Made {
public:
  explicit Made(PyObject *stolen) : object_(stolen) {
    if (object_ == nullptr)
      throw py::error_already_set();
  }
  ~Made() { Py_XDECREF(object_); }
  Made(const Made &) = delete;
  Made &operator=(const Made &) = delete;

  [[nodiscard]] PyObject *get() const noexcept { return object_; }
  [[nodiscard]] PyObject *give() noexcept { return std::exchange(object_, nullptr); }

private:
  PyObject *object_;
};

[[nodiscard]] inline PyObject *attribute(PyObject *of, const py::str &name) {
  return Made(PyObject_GetAttr(of, name.ptr())).give();
}

[[nodiscard]] inline bool is_true(PyObject *value) {
  if (value == Py_None)
    return false;
  if (PyFloat_CheckExact(value))
    return PyFloat_AS_DOUBLE(value) != 0;
  const int truth = PyObject_IsTrue(value);
  if (truth < 0)
    throw py::error_already_set();
  return truth != 0;
}

[[nodiscard]] inline PyTypeObject *as_type(const py::type &type) noexcept {
  return reinterpret_cast<PyTypeObject *>(type.ptr());
}

// A class whose instances are tuples and nothing else, as named tuples are.
[[nodiscard]] inline PyTypeObject *tuple_class(const py::type &type) {
  PyTypeObject *const found = as_type(type);
  if (!PyType_IsSubtype(found, &PyTuple_Type) || found->tp_dictoffset != 0)
    throw py::type_error(std::string(found->tp_name) + " is no tuple alone");
  return found;
}

// A class that has __slots__ and nothing else: they lie behind the object's head, pointer after
// pointer.
class SlotClass {
public:
  explicit SlotClass(PyTypeObject *type) : type_(type) {
    const bool is_slots_alone = PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) &&
                                type->tp_base == &PyBaseObject_Type && type->tp_dictoffset == 0 &&
                                type->tp_weaklistoffset == 0 && type->tp_itemsize == 0 &&
                                type->tp_basicsize == head + word * num_slots();
    if (!is_slots_alone)
      throw py::type_error(std::string(type->tp_name) + " has more than __slots__");
  }

  [[nodiscard]] PyTypeObject *type() const noexcept { return type_; }

  // A shallow copy of one of its instances: far cheaper than a constructor that sets each slot.
  [[nodiscard]] PyObject *copy(PyObject *of) const {
    Made copied(type_->tp_alloc(type_, 0));
    PyObject **const from = slots(of), **const to = slots(copied.get());
    for (Py_ssize_t i = 0; i < num_slots(); ++i)
      to[i] = Py_XNewRef(from[i]);
    return copied.give();
  }

  // Where a slot lies, for slot().
  [[nodiscard]] Py_ssize_t offset(const char *name) const {
    const auto found = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject *>(type_), name));
    if (!found)
      throw py::error_already_set();
    const auto *member = reinterpret_cast<PyMemberDescrObject *>(found.ptr());
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type || PyDescr_TYPE(member) != type_)
      throw py::type_error(std::string(type_->tp_name) + "." + name + " is no slot");
    return member->d_member->offset;
  }

private:
  static constexpr Py_ssize_t head = sizeof(PyObject), word = sizeof(PyObject *);

  [[nodiscard]] Py_ssize_t num_slots() const noexcept {
    return Py_SIZE(reinterpret_cast<PyObject *>(type_));
  }
  [[nodiscard]] static PyObject **slots(PyObject *of) noexcept {
    return reinterpret_cast<PyObject **>(reinterpret_cast<char *>(of) + head);
  }

  PyTypeObject *type_; // held by whoever holds us
};

// The slot of an object of such a class, by SlotClass::offset().
[[nodiscard]] inline PyObject *&slot(PyObject *of, Py_ssize_t offset) noexcept {
  return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(of) + offset);
}

// Puts a value into a slot, whose reference becomes the slot's.
inline void put_slot(PyObject *of, Py_ssize_t offset, PyObject *stolen) noexcept {
  PyObject *const before = std::exchange(slot(of, offset), stolen);
  Py_XDECREF(before);
}

inline void share(PyObject *of, Py_ssize_t offset, PyObject *value) noexcept {
  put_slot(of, offset, Py_NewRef(value));
}

// Takes what leads to no cycle out of the collector's sight: to look through it costs more than to
// make it, and a client that holds a batch while it takes the next would pay for full collections.
[[nodiscard]] inline PyObject *untracked(PyObject *made) {
  Made object(made);
  PyObject_GC_UnTrack(object.get());
  return object.give();
}

[[nodiscard]] inline PyObject *list_of(const int32_t *from, Py_ssize_t count) {
  Made list(untracked(PyList_New(count)));
  for (Py_ssize_t i = 0; i < count; ++i)
    PyList_SET_ITEM(list.get(), i, Made(PyLong_FromLong(from[i])).give());
  return list.give();
}

[[nodiscard]] inline PyObject *list_of(const float *from, Py_ssize_t count) {
  Made list(untracked(PyList_New(count)));
  for (Py_ssize_t i = 0; i < count; ++i) // widened exactly
    PyList_SET_ITEM(list.get(), i, Made(PyFloat_FromDouble(double{from[i]})).give());
  return list.give();
}

// A column of a batch: contiguous, of exactly this dtype.
template <class T> using Column = py::array_t<T, py::array::c_style>;

template <class T> [[nodiscard]] Column<T> column_of(py::handle array, const char *name) {
  if (!Column<T>::check_(array))
    throw py::type_error(std::string(name) + " is no contiguous column of its dtype");
  return py::reinterpret_borrow<Column<T>>(array);
}

// Which tokens are row i's. Checked, since the offsets lie in memory that others write.
class Offsets {
public:
  Offsets(py::handle array, py::ssize_t most)
      : column_(column_of<uint32_t>(array, "token_offsets")), most_(most) {}

  [[nodiscard]] py::ssize_t num_rows() const noexcept { return column_.size() - 1; }
  struct Part {
    py::ssize_t begin, count;
  };
  [[nodiscard]] Part of(py::ssize_t i) const {
    if (i < 0 || i >= num_rows())
      throw py::index_error("row " + std::to_string(i) + " of " + std::to_string(num_rows()));
    const py::ssize_t begin = column_.data()[i], end = column_.data()[i + 1];
    if (begin > end || end > most_)
      throw py::index_error("tokens " + std::to_string(begin) + " to " + std::to_string(end) +
                            " of a row, of " + std::to_string(most_));
    return {begin, end - begin};
  }

private:
  Column<uint32_t> column_;
  py::ssize_t most_;
};

// The candidates of a batch, for each of its rows as a LogprobsLists. Given as (token_offsets,
// topk_ids, topk_logprobs, ranks).
class Candidates {
public:
  explicit Candidates(const py::tuple &columns)
      : ids_(column_of<int32_t>(columns[1], "topk_ids")),
        logprobs_(column_of<float>(columns[2], "topk_logprobs")),
        ranks_(column_of<int32_t>(columns[3], "ranks")), offsets_(columns[0], ranks_.size()) {
    if (ids_.ndim() != 2 || logprobs_.ndim() != 2 || ids_.shape(0) != ranks_.size() ||
        logprobs_.shape(0) != ranks_.size() || logprobs_.shape(1) != ids_.shape(1))
      throw py::value_error("topk_ids, topk_logprobs and ranks are of different sizes");
    width_ = ids_.shape(1);
    if (width_ == 0)
      throw py::value_error("topk_ids has no columns");
  }

  [[nodiscard]] PyObject *lists_of(py::ssize_t i, PyTypeObject *lists) const {
    const auto [begin, count] = offsets_.of(i);
    Made made(untracked(lists->tp_alloc(lists, 3)));
    PyTuple_SET_ITEM(made.get(), 0, rows(ids_.data(), begin, count));
    PyTuple_SET_ITEM(made.get(), 1, rows(logprobs_.data(), begin, count));
    PyTuple_SET_ITEM(made.get(), 2, list_of(ranks_.data() + begin, count));
    return made.give();
  }

private:
  template <class T>
  [[nodiscard]] PyObject *rows(const T *from, py::ssize_t begin, py::ssize_t count) const {
    Made list(untracked(PyList_New(count)));
    for (py::ssize_t j = 0; j < count; ++j)
      PyList_SET_ITEM(list.get(), j, list_of(from + (begin + j) * width_, width_));
    return list.give();
  }

  Column<int32_t> ids_;
  Column<float> logprobs_;
  Column<int32_t> ranks_;
  Offsets offsets_;
  py::ssize_t width_ = 0;
};

// Borrowed: the first candidate of a row's last token, which is the sampled one.
[[nodiscard]] inline PyObject *logprob_of_last(PyObject *lists) noexcept {
  PyObject *const rows = PyTuple_GET_ITEM(lists, 1);
  return PyList_GET_ITEM(PyList_GET_ITEM(rows, PyList_GET_SIZE(rows) - 1), 0);
}

[[nodiscard]] inline py::str interned(const char *name) {
  return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name));
}

// Fills in the stamps of a RequestMetrics that a token has.
class Stamps {
public:
  explicit Stamps(py::type type) : holder_(std::move(type)), class_(as_type(holder_)) {}

  // A copy as it stands when a token came at `now`, the first one at `first` (nullptr: unknown).
  [[nodiscard]] PyObject *at_token(PyObject *metrics, PyObject *now, PyObject *first) const {
    if (Py_TYPE(metrics) != class_.type())
      throw py::type_error(std::string("metrics is a ") + Py_TYPE(metrics)->tp_name +
                           ", must be a " + class_.type()->tp_name);
    Made made(untracked(class_.copy(metrics)));
    PyObject *const m = made.get();
    share(m, latest_, now);
    share(m, engine_latest_, now);
    if (first != nullptr)
      share(m, first_, first);
    PyObject *const arrival = there(m, arrival_, "arrival_time");
    PyObject *const inference = there(m, inference_start_, "inference_start_time");
    if (arrival != Py_None)
      put_slot(m, execute_, difference(now, arrival));
    if (is_true(inference))
      put_slot(m, forward_, difference(now, inference));
    set_cost(m, first_token_, inference, there(m, first_, "engine_recv_first_token_time"));
    PyObject *const preprocessed = there(m, preprocess_end_, "preprocess_end_time");
    set_cost(m, queued_, preprocessed, inference);
    set_cost(m, preprocess_, there(m, preprocess_start_, "preprocess_start_time"), preprocessed);
    share(m, request_start_, arrival);
    share(m, received_, there(m, engine_get_, "engine_get_req_time"));
    share(m, sent_, inference);
    return made.give();
  }

private:
  [[nodiscard]] static PyObject *there(PyObject *m, Py_ssize_t offset, const char *name) {
    PyObject *const value = slot(m, offset);
    if (value == nullptr)
      throw py::attribute_error(name);
    return value;
  }

  [[nodiscard]] static PyObject *difference(PyObject *end, PyObject *begin) {
    if (PyFloat_CheckExact(end) && PyFloat_CheckExact(begin))
      return Made(PyFloat_FromDouble(PyFloat_AS_DOUBLE(end) - PyFloat_AS_DOUBLE(begin))).give();
    return Made(PyNumber_Subtract(end, begin)).give(); // the caller's stamps may be other numbers
  }

  // Left as it is where an end of it is unknown.
  static void set_cost(PyObject *m, Py_ssize_t offset, PyObject *begin, PyObject *end) {
    if (is_true(begin) && is_true(end))
      put_slot(m, offset, difference(end, begin));
  }

  py::type holder_;
  SlotClass class_;
  const Py_ssize_t arrival_ = class_.offset("arrival_time"),
                   preprocess_start_ = class_.offset("preprocess_start_time"),
                   preprocess_end_ = class_.offset("preprocess_end_time"),
                   engine_get_ = class_.offset("engine_get_req_time"),
                   inference_start_ = class_.offset("inference_start_time"),
                   first_ = class_.offset("engine_recv_first_token_time"),
                   latest_ = class_.offset("engine_recv_latest_token_time"),
                   engine_latest_ = class_.offset("llm_engine_recv_latest_token_timestamp"),
                   received_ = class_.offset("llm_engine_recv_req_timestamp"),
                   sent_ = class_.offset("llm_engine_send_req_to_engine_timestamp"),
                   request_start_ = class_.offset("request_start_time"),
                   execute_ = class_.offset("model_execute_time"),
                   forward_ = class_.offset("model_forward_time"),
                   first_token_ = class_.offset("first_token_time"),
                   queued_ = class_.offset("time_in_queue"),
                   preprocess_ = class_.offset("preprocess_cost_time");
};

// Makes the outputs of a batch as if no request ended with it; whoever calls says what ends.
class OutputMaker {
public:
  // `request_output`, `completion`: what every output begins as. `is_decode`: the instance goes on
  // where another began, so its first token is the request's second one.
  OutputMaker(py::object request_output, py::object completion, const Stamps &stamps,
              py::type logprobs_lists, bool is_decode)
      : output_prototype_(std::move(request_output)), completion_prototype_(std::move(completion)),
        stamps_(stamps), lists_holder_(std::move(logprobs_lists)),
        lists_(tuple_class(lists_holder_)), is_decode_(is_decode) {}

  // Of `requests` [n] a RequestOutput each. `columns`: (row, send_idx, token_offsets,
  // finish_reason, first_token_ns, token_ids) of the batch. `candidates`: None or those of the
  // tokens. `drafts`: None, or (candidates of another batch, its row of each output or -1).
  [[nodiscard]] py::list make(const py::list &requests, const py::tuple &columns,
                              const py::object &candidates, const py::object &drafts,
                              const py::float_ &now, const py::int_ &output_type, bool has_slot,
                              int64_t wall_offset_ns) const {
    const auto row = column_of<uint32_t>(columns[0], "row"),
               send_idx = column_of<uint32_t>(columns[1], "send_idx");
    const auto reason = column_of<uint8_t>(columns[3], "finish_reason");
    const auto first_ns = column_of<uint64_t>(columns[4], "first_token_ns");
    const auto tokens = column_of<int32_t>(columns[5], "token_ids");
    const Offsets offsets(columns[2], tokens.size());
    const py::tuple held(requests); // the list is the caller's, who may change it meanwhile
    const auto n = static_cast<py::ssize_t>(held.size());
    for (const py::ssize_t size :
         {row.size(), send_idx.size(), reason.size(), first_ns.size(), offsets.num_rows()})
      if (size != n)
        throw py::value_error("the batch's columns are of different sizes");
    const auto own = candidates.is_none() ? nullptr : std::make_unique<Candidates>(candidates);
    const auto theirs = drafts.is_none() ? nullptr : std::make_unique<Drafts>(drafts, n);
    Made made(PyList_New(n));
    for (py::ssize_t i = 0; i < n; ++i) {
      PyObject *const request = PyTuple_GET_ITEM(held.ptr(), i);
      const auto [begin, count] = offsets.of(i);
      const uint32_t sent = send_idx.data()[i];
      Made completion(untracked(completion_class_.copy(completion_prototype_.ptr())));
      PyObject *const c = completion.get();
      put_slot(c, index_, Made(PyLong_FromUnsignedLong(row.data()[i])).give());
      put_slot(c, send_idx_, Made(PyLong_FromUnsignedLong(sent)).give());
      put_slot(c, token_ids_, list_of(tokens.data() + begin, count));
      put_slot(c, draft_token_ids_, untracked(PyList_New(0)));
      if (own && count != 0) {
        put_slot(c, top_logprobs_, own->lists_of(i, lists_));
        share(c, logprob_, logprob_of_last(slot(c, top_logprobs_)));
      }
      if (theirs && theirs->row_of.data()[i] >= 0)
        put_slot(c, draft_top_logprobs_, theirs->batch.lists_of(theirs->row_of.data()[i], lists_));
      Made output(output_class_.copy(output_prototype_.ptr()));
      PyObject *const o = output.get();
      const Made before(attribute(request, names_.metrics));
      if (is_decode_ && sent == 1 && reason.data()[i] <= TP_FINISH_LENGTH &&
          PyObject_SetAttr(before.get(), names_.second_token.ptr(), now.ptr()) != 0)
        throw py::error_already_set();
      put_slot(o, metrics_, metrics_of(request, before, now, first_ns.data()[i], wall_offset_ns));
      put_slot(o, outputs_, completion.give());
      share(o, output_type_, output_type.ptr());
      put_slot(o, prompt_token_ids_, untracked(PyList_New(0)));
      echo(o, request, sent == 0 && has_slot);
      if (reason.data()[i] == TP_FINISH_NONE && !holds_a_container(o))
        PyObject_GC_UnTrack(o);
      PyList_SET_ITEM(made.get(), i, output.give());
    }
    return py::reinterpret_steal<py::list>(made.give());
  }

private:
  struct Drafts {
    Drafts(const py::tuple &given, py::ssize_t n)
        : batch(given[0]), row_of(column_of<int64_t>(given[1], "row_of")) {
      if (row_of.size() != n)
        throw py::value_error("the drafts' rows are not those of the batch");
    }
    Candidates batch;
    Column<int64_t> row_of;
  };

  // Whether an output holds what its request's owner can still change; all else in it is ours.
  [[nodiscard]] bool holds_a_container(PyObject *o) const noexcept {
    return PyObject_IS_GC(slot(o, prompt_)) || PyObject_IS_GC(slot(o, ic_req_data_)) ||
           PyObject_IS_GC(slot(o, prompt_logprobs_));
  }

  // An instance that only goes on has its first token's stamp from the one that began.
  [[nodiscard]] PyObject *metrics_of(PyObject *request, const Made &before, const py::float_ &now,
                                     uint64_t first_ns, int64_t wall_offset_ns) const {
    if (first_ns == 0)
      return stamps_.at_token(before.get(), now.ptr(), nullptr);
    const Made emitted(attribute(request, names_.num_emitted_tokens));
    if (is_true(emitted.get()))
      return stamps_.at_token(before.get(), now.ptr(), nullptr);
    const auto wall_ns = static_cast<double>(static_cast<__int128>(first_ns) + wall_offset_ns);
    const Made first(PyFloat_FromDouble(wall_ns / 1e9));
    return stamps_.at_token(before.get(), now.ptr(), first.get());
  }

  // What an output repeats of its request.
  void echo(PyObject *o, PyObject *request, bool is_first) const {
    put_slot(o, request_id_, attribute(request, names_.request_id));
    const Made prompt_ids(attribute(request, names_.prompt_token_ids));
    const Py_ssize_t length = PyObject_Size(prompt_ids.get());
    if (length < 0)
      throw py::error_already_set();
    put_slot(o, prompt_token_ids_len_, Made(PyLong_FromSsize_t(length)).give());
    const Made pieces(attribute(request, names_.prompt_pieces));
    if (PyObject_Size(pieces.get()) != 0) // none to take in all but a few outputs
      put_slot(o, prompt_logprobs_,
               Made(PyObject_CallMethodNoArgs(request, names_.take_prompt_logprobs.ptr())).give());
    put_slot(o, num_cached_tokens_, attribute(request, names_.num_cached_tokens));
    put_slot(o, ic_req_data_, attribute(request, names_.ic_req_data));
    if (is_first)
      put_slot(o, prompt_, attribute(request, names_.prompt));
    const Made media(attribute(request, names_.multimodal_inputs));
    if (media.get() == Py_None)
      return;
    const auto given = py::reinterpret_borrow<py::object>(media.get());
    if (!py::bool_(given))
      return;
    const py::object get = given.attr("get");
    put_slot(o, image_tokens_, get("num_input_image_tokens", 0).release().ptr());
    put_slot(o, video_tokens_, get("num_input_video_tokens", 0).release().ptr());
  }

  struct Names {
    py::str request_id = interned("request_id"), metrics = interned("metrics"),
            prompt = interned("prompt"), prompt_token_ids = interned("prompt_token_ids"),
            num_emitted_tokens = interned("num_emitted_tokens"),
            num_cached_tokens = interned("num_cached_tokens"),
            ic_req_data = interned("ic_req_data"),
            multimodal_inputs = interned("multimodal_inputs"),
            prompt_pieces = interned("_prompt_pieces"),
            take_prompt_logprobs = interned("take_prompt_logprobs"),
            second_token = interned("decode_recv_second_token_time");
  };

  const py::object output_prototype_, completion_prototype_;
  const Stamps &stamps_;
  const py::type lists_holder_;
  PyTypeObject *const lists_;
  const bool is_decode_;
  const Names names_;
  const SlotClass output_class_{Py_TYPE(output_prototype_.ptr())},
      completion_class_{Py_TYPE(completion_prototype_.ptr())};
  const Py_ssize_t index_ = completion_class_.offset("index"),
                   send_idx_ = completion_class_.offset("send_idx"),
                   token_ids_ = completion_class_.offset("token_ids"),
                   logprob_ = completion_class_.offset("logprob"),
                   top_logprobs_ = completion_class_.offset("top_logprobs"),
                   draft_top_logprobs_ = completion_class_.offset("draft_top_logprobs"),
                   draft_token_ids_ = completion_class_.offset("draft_token_ids");
  const Py_ssize_t request_id_ = output_class_.offset("request_id"),
                   outputs_ = output_class_.offset("outputs"),
                   metrics_ = output_class_.offset("metrics"),
                   output_type_ = output_class_.offset("output_type"),
                   prompt_ = output_class_.offset("prompt"),
                   prompt_token_ids_ = output_class_.offset("prompt_token_ids"),
                   prompt_token_ids_len_ = output_class_.offset("prompt_token_ids_len"),
                   prompt_logprobs_ = output_class_.offset("prompt_logprobs"),
                   num_cached_tokens_ = output_class_.offset("num_cached_tokens"),
                   image_tokens_ = output_class_.offset("num_input_image_tokens"),
                   video_tokens_ = output_class_.offset("num_input_video_tokens"),
                   ic_req_data_ = output_class_.offset("ic_req_data");
};

} // namespace tp::python
