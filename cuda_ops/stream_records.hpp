// stream_records.hpp: a message of FastDeploy's zmq path, a list with a record a row, as steps of
// the ring.
//
// One message may give several steps: prompt logprobs first (the next output carries them), then
// tokens, then drafts, then vectors; each step holds rows that fit together. A message is checked
// as a whole before its first step can be taken. One that is refused gives a single step that says
// why: without rows when it is no such message, otherwise with its rows, which end with an error,
// since a request that goes on would hide the hole.
#pragma once

#include <optional>
#include <utility>

#include "pickle.hpp"
#include "plan.hpp"

namespace tp {

// The state of a row in a refused message: none that an engine can save.
constexpr uint8_t refused_row = 255;

class StreamRecords {
public:
  StreamRecords(const tp_sizes &sizes, uint64_t max_message_bytes)
      : sizes_(sizes), max_records_(2 * sizes.max_num_seqs), // a target's and a draft's record
        reader_({max_message_bytes, objects_per_record * (max_records_ + 4)}) {}

  // Reads a message, of which nothing is needed afterwards. Steps of the message before that were
  // not taken are forgotten.
  [[nodiscard]] std::optional<pickle::Refused> read(std::span<const uint8_t> message) {
    clear();
    std::span<const Value> records;
    try {
      records = records_of(reader_.read(message));
      for (const Value &record : records)
        fields_.push_back(fields_of(record));
      take_prompts(message.size());
      for (const Fields &fields : fields_)
        rows_.push_back(row_of(fields));
      take_rows();
      mark_end();
      return std::nullopt;
    } catch (const pickle::Refused &refused) {
      clear();
      refuse(refused, records);
      return refused;
    }
  }

  // The next step is one that ends every running request.
  void add_gap() { steps_.push_back(begin_step(TP_STEP_GAP, 0)); }

  [[nodiscard]] bool has_step() const noexcept { return next_ < steps_.size(); }

  // Writes the next step, but for its sequences and stamps; returns how many tokens it has that a
  // request is owed.
  uint32_t fill(tp_step &slot) noexcept {
    const Step &step = steps_[next_++];
    const StepColumns at(step.num_rows, step.num_tokens, step.width, step.flags);
    copy(slot, at.rows, row_, step.row, step.num_rows);
    copy(slot, at.states, state_, step.row, step.num_rows);
    std::memset(column<uint32_t>(slot, at.generations), 0, 4 * size_t{step.num_rows});
    if (step.flags & TP_STEP_POSITIONS)
      copy(slot, at.positions, position_, step.row, step.num_rows);
    if (step.flags & TP_STEP_ACCEPT)
      copy(slot, at.accept_num, accept_, step.row, step.num_rows);
    const uint64_t cells = uint64_t{step.num_tokens} * step.width;
    copy(slot, at.logprobs, logprob_, step.logprob, cells);
    if (!(step.flags & TP_STEP_POOLING)) {
      copy(slot, at.tokens, token_, step.token, step.num_tokens);
      copy(slot, at.topk_ids, id_, step.id, cells);
      copy(slot, at.ranks, rank_, step.rank, step.width ? step.num_tokens : 0);
    }
    slot.num_rows = step.num_rows;
    slot.num_tokens = step.num_tokens;
    slot.width = step.width;
    slot.flags = step.flags | TP_STEP_UNSTAMPED | TP_STEP_NOT_NEED_STOP;
    slot.message_flag = step.message_flag;
    slot.body_bytes = static_cast<uint32_t>(at.end - sizeof(tp_step));
    slot.bad = step.bad;
    return step.num_saved;
  }

private:
  using Value = pickle::Value;
  using Kind = pickle::Kind;
  using Array = pickle::Array;
  using Refusal = pickle::Refusal;
  using Refused = pickle::Refused;

  // A record with logprobs, prompt logprobs and a mask has about 130 memo entries.
  static constexpr uint32_t objects_per_record = 256;

  // The fields of a record. The flag has been spelt in two ways.
  enum Field : uint8_t {
    decoder_state,
    batch_id,
    tokens,
    logprobs,
    prompt_logprobs,
    pooler_output,
    sampling_mask, // not delivered: no output of FastDeploy's other path has it
    accept_tokens,
    accept_num,
    output_type,
    speculative,
    speculative_once,
    num_fields,
  };
  static constexpr std::string_view field_names[num_fields] = {"decoder_state",
                                                               "batch_id",
                                                               "tokens",
                                                               "logprobs",
                                                               "prompt_logprobs",
                                                               "pooler_output",
                                                               "sampling_mask",
                                                               "accept_tokens",
                                                               "accept_num",
                                                               "output_type",
                                                               "speculative_decoding",
                                                               "speculaive_decoding"};
  struct Fields {
    Value value[num_fields];
    [[nodiscard]] const Value &operator[](Field field) const noexcept { return value[field]; }
    [[nodiscard]] bool has(Field field) const noexcept { return value[field].kind != Kind::none; }
  };

  struct Candidates {
    const Array *ids = nullptr, *logprobs = nullptr, *ranks = nullptr;
    [[nodiscard]] uint64_t rows() const noexcept { return ids ? ids->shape[0] : 0; }
    [[nodiscard]] uint32_t width() const noexcept {
      return ids ? static_cast<uint32_t>(ids->shape[1]) : 0;
    }
  };

  enum class Mode : uint8_t { tokens, drafts, vectors };
  struct Row {
    uint32_t number = 0;
    Mode mode = Mode::tokens;
    uint8_t state = TP_ROW_TOKEN;
    bool is_speculative = false;
    uint32_t num = 0;              // tokens
    uint32_t width = 0;            // candidates of a token, or floats of the vector
    const Array *values = nullptr; // tokens, or the vector
    Candidates candidates;
  };

  // Where the columns of a step begin in the vectors below.
  struct Step {
    uint32_t flags = 0, message_flag = TP_MESSAGE_TARGET, bad = TP_BAD_NONE, width = 0;
    uint32_t num_rows = 0, num_tokens = 0, num_saved = 0;
    size_t row = 0, token = 0, id = 0, logprob = 0, rank = 0;
  };

  void clear() noexcept {
    fields_.clear();
    rows_.clear();
    steps_.clear();
    row_.clear();
    state_.clear();
    position_.clear();
    accept_.clear();
    token_.clear();
    id_.clear();
    logprob_.clear();
    rank_.clear();
    next_ = 0;
  }

  template <class T>
  static void copy(tp_step &slot, uint64_t to, const std::vector<T> &from, size_t at,
                   size_t count) {
    if (count != 0)
      std::memcpy(column<T>(slot, to), from.data() + at, count * sizeof(T));
  }

  // -------------------------------------------------------------- what a message holds

  // The list itself, or {"__meta": {...}, "data": list} as FastDeploy's servers send it.
  [[nodiscard]] std::span<const Value> records_of(Value root) const {
    if (root.kind == Kind::dict) {
      const std::span<const Value> items = reader_.dict(root);
      const auto is = [](const Value &key, std::string_view name) {
        return key.kind == Kind::text && key.text() == name;
      };
      if (items.size() != 4 || !is(items[0], "__meta") || !is(items[2], "data"))
        throw Refused(Refusal::type,
                      "a message that is a dict must be {'__meta': ..., 'data': ...}");
      root = items[3];
    }
    const std::span<const Value> records = list_of(root, "a message");
    if (records.size() > max_records_)
      throw Refused(Refusal::row, "a message has " + std::to_string(records.size()) +
                                      " records, the limit is twice max_num_seqs = " +
                                      std::to_string(max_records_));
    return records;
  }

  [[nodiscard]] std::span<const Value> list_of(const Value &value, const char *what) const {
    if (value.kind != Kind::list)
      throw_type(what, value, "a list");
    return reader_.list(value);
  }

  [[noreturn]] static void throw_type(std::string_view what, const Value &found,
                                      const char *wanted) {
    throw Refused(Refusal::type, std::string(what) + " is " +
                                     pickle::kind_names[static_cast<size_t>(found.kind)] +
                                     ", must be " + wanted);
  }

  [[nodiscard]] Fields fields_of(const Value &record) const {
    if (record.kind != Kind::record)
      throw_type("an item of a message", record, "a record");
    Fields fields;
    const std::span<const Value> state = reader_.fields(record);
    for (size_t i = 0; i < state.size(); i += 2) {
      if (state[i].kind != Kind::text)
        throw_type("a field's name", state[i], "a str");
      const auto *found =
          std::find(std::begin(field_names), std::end(field_names), state[i].text());
      if (found == std::end(field_names))
        throw Refused(Refusal::record,
                      "a record has a field '" + pickle::shown(state[i].text()) + "'");
      fields.value[found - field_names] = state[i + 1];
    }
    return fields;
  }

  [[nodiscard]] const Array &array_of(const Fields &fields, Field field, bool is_float) const {
    return array_of(fields[field], field_names[field], is_float);
  }
  [[nodiscard]] const Array &array_of(const Value &value, std::string_view name,
                                      bool is_float) const {
    const char *wanted = is_float ? "an array of floats" : "an array of integers";
    if (value.kind != Kind::array)
      throw_type(name, value, wanted);
    const Array &array = reader_.array(value);
    if (!array.is_built || array.is_float() != is_float)
      throw Refused(Refusal::type, std::string(name) + " is of another dtype, must be " + wanted);
    return array;
  }

  [[nodiscard]] int64_t whole_of(const Fields &fields, Field field) const {
    const Value &value = fields[field];
    if (value.kind == Kind::integer)
      return value.integer;
    const Array &array = array_of(fields, field, false);
    if (array.count() != 1)
      throw Refused(Refusal::record, std::string(field_names[field]) + " has " +
                                         std::to_string(array.count()) + " numbers, must have 1");
    return element(array, 0);
  }

  [[nodiscard]] static int64_t element(const Array &array, uint64_t at) {
    int64_t found = 0;
    array.each(at, at + 1, [&](auto value) { found = static_cast<int64_t>(value); });
    return found;
  }

  [[nodiscard]] uint32_t number_of(const Fields &fields) const {
    const int64_t row = whole_of(fields, batch_id);
    if (row < 0 || row >= int64_t{sizes_.max_num_seqs})
      throw Refused(Refusal::row, "batch_id is " + std::to_string(row) +
                                      ", must be 0 to max_num_seqs - 1 = " +
                                      std::to_string(sizes_.max_num_seqs - 1));
    return static_cast<uint32_t>(row);
  }

  [[nodiscard]] Candidates candidates_of(const Fields &fields, Field field) const {
    const Value &value = fields[field];
    if (value.kind == Kind::none)
      return {};
    if (value.kind != Kind::logprobs)
      throw_type(field_names[field], value, "LogprobsTensors");
    const std::span<const Value> items = reader_.tuple({.length = 3, .index = value.index});
    const Candidates found{&array_of(items[0], "logprob_token_ids", false),
                           &array_of(items[1], "logprobs", true),
                           &array_of(items[2], "selected_token_ranks", false)};
    if (found.ids->ndim != 2 || found.logprobs->ndim != 2 ||
        found.ids->shape[0] != found.logprobs->shape[0] ||
        found.ids->shape[1] != found.logprobs->shape[1] ||
        found.ranks->count() != found.ids->shape[0])
      throw Refused(Refusal::record, "the shapes of logprob_token_ids, logprobs and "
                                     "selected_token_ranks do not fit together");
    if (found.width() < 1 || found.ids->shape[1] > uint64_t{sizes_.top_logprobs} + 1)
      throw Refused(Refusal::width, std::string(field_names[field]) + " has " +
                                        std::to_string(found.ids->shape[1]) +
                                        " columns, must be 1 to top_logprobs + 1 = " +
                                        std::to_string(sizes_.top_logprobs + 1));
    return found;
  }

  // What a negative last token, or a count below 1, says of its row.
  [[nodiscard]] static uint8_t control_state(int64_t code) noexcept {
    return code == -9 ? TP_ROW_ACKNOWLEDGED : code == -3 ? TP_ROW_RECOVERY : TP_ROW_NONE;
  }

  // Tokens of a row, or what it says instead.
  void take_tokens(const Fields &fields, Row &row) const {
    row.is_speculative = fields.has(accept_num);
    const Field field = fields.has(accept_tokens) ? accept_tokens : tokens;
    const Array &array = array_of(fields, field, false);
    const int64_t count =
        row.is_speculative ? whole_of(fields, accept_num) : static_cast<int64_t>(array.count());
    if (count > static_cast<int64_t>(array.count()))
      throw Refused(Refusal::record, "accept_num is " + std::to_string(count) + ", " +
                                         std::string(field_names[field]) + " has " +
                                         std::to_string(array.count()));
    const int64_t code = count > 0 ? element(array, static_cast<uint64_t>(count) - 1) : count;
    if (code < 0 || count == 0) {
      row.state = control_state(code);
      return;
    }
    if (count > int64_t{sizes_.max_draft_tokens})
      throw Refused(Refusal::row, "row " + std::to_string(row.number) + " has " +
                                      std::to_string(count) + " tokens, max_draft_tokens is " +
                                      std::to_string(sizes_.max_draft_tokens));
    row.num = static_cast<uint32_t>(count);
    row.values = &array;
  }

  [[nodiscard]] Row row_of(const Fields &fields) const {
    Row row;
    row.number = number_of(fields);
    if (fields[decoder_state].kind != Kind::state)
      throw_type("decoder_state", fields[decoder_state], "a decoder state");
    if (fields.has(pooler_output)) {
      row.mode = Mode::vectors;
      row.values = &array_of(fields, pooler_output, true);
      if (row.values->count() < 1 || row.values->count() > sizes_.max_pooling_floats)
        throw Refused(Refusal::width, "pooler_output has " + std::to_string(row.values->count()) +
                                          " floats, must be 1 to max_pooling_floats = " +
                                          std::to_string(sizes_.max_pooling_floats));
      row.width = static_cast<uint32_t>(row.values->count());
      return row;
    }
    const int64_t type = fields.has(output_type) ? whole_of(fields, output_type) : 3;
    if (type != TP_MESSAGE_TARGET && type != TP_MESSAGE_DRAFT)
      throw Refused(Refusal::record,
                    "output_type is " + std::to_string(type) + ", must be 3 (target) or 4 (draft)");
    row.mode = type == TP_MESSAGE_DRAFT ? Mode::drafts : Mode::tokens;
    take_tokens(fields, row);
    if (row.state != TP_ROW_TOKEN)
      return row;
    row.candidates = candidates_of(fields, logprobs);
    row.width = row.candidates.width();
    if (row.mode == Mode::drafts) // as many as have candidates: nothing else of them is wanted
      row.num = static_cast<uint32_t>(std::min<uint64_t>(row.num, row.candidates.rows()));
    else if (row.width != 0 && row.candidates.rows() < row.num)
      throw Refused(Refusal::record, "row " + std::to_string(row.number) + " has " +
                                         std::to_string(row.num) + " tokens, but logprobs of " +
                                         std::to_string(row.candidates.rows()));
    return row;
  }

  // -------------------------------------------------------------- steps

  void take_prompts(uint64_t message_bytes) {
    uint64_t bytes = 0;
    for (const Fields &fields : fields_) {
      const Candidates prompt = candidates_of(fields, prompt_logprobs);
      if (prompt.rows() == 0)
        continue;
      // One array may be named by many records, but not so as to make more than was sent.
      bytes += prompt.ids->bytes() + prompt.logprobs->bytes();
      if (bytes > message_bytes)
        throw Refused(Refusal::limit, "prompt_logprobs add up to more than the message's " +
                                          std::to_string(message_bytes) + " bytes");
      const uint64_t most = max_prompt_tokens(sizes_);
      for (uint64_t at = 0; at < prompt.rows(); at += most)
        take_prompt(number_of(fields), prompt, at, std::min(most, prompt.rows() - at));
    }
  }

  void take_prompt(uint32_t number, const Candidates &prompt, uint64_t from, uint64_t count) {
    Step step = begin_step(TP_STEP_PROMPT | TP_STEP_ACCEPT | TP_STEP_POSITIONS, prompt.width());
    add_row(step, number, TP_ROW_TOKEN, static_cast<int32_t>(count), static_cast<int32_t>(from));
    for (uint64_t i = from; i < from + count; ++i)
      token_.push_back(static_cast<int32_t>(element(*prompt.ids, i * prompt.ids->shape[1])));
    add_candidates(prompt, from, count);
    step.num_tokens = static_cast<uint32_t>(count);
    steps_.push_back(step);
  }

  void take_rows() {
    for (const Mode mode : {Mode::tokens, Mode::drafts, Mode::vectors}) {
      run_.clear();
      std::optional<uint32_t> width; // of the first row of the run that has tokens
      for (const Row &row : rows_) {
        const bool is_told = row.mode == mode && (mode != Mode::drafts || row.num != 0);
        if (!is_told)
          continue;
        const bool has_width = row.state == TP_ROW_TOKEN;
        if (run_.size() == sizes_.max_num_seqs || (has_width && width && *width != row.width)) {
          take_run(mode, width.value_or(0));
          run_.clear();
          width.reset();
        }
        if (has_width)
          width = row.width;
        run_.push_back(&row);
      }
      if (!run_.empty())
        take_run(mode, width.value_or(0));
    }
  }

  // Drafts are about rows that their target's step has told.
  void mark_end() noexcept {
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step)
      if (step->message_flag == TP_MESSAGE_TARGET && !(step->flags & TP_STEP_PROMPT)) {
        step->flags |= TP_STEP_MESSAGE_END;
        return;
      }
  }

  void take_run(Mode mode, uint32_t width) {
    const bool is_packed =
        mode == Mode::drafts ||
        (mode == Mode::tokens && std::any_of(run_.begin(), run_.end(), [](const Row *row) {
           return row->is_speculative || row->num > 1;
         }));
    Step step = begin_step(
        (is_packed ? TP_STEP_ACCEPT : 0) | (mode == Mode::vectors ? TP_STEP_POOLING : 0), width);
    step.message_flag = mode == Mode::drafts ? TP_MESSAGE_DRAFT : TP_MESSAGE_TARGET;
    for (const Row *row : run_) {
      add_row(step, row->number, row->state, static_cast<int32_t>(row->num), 0);
      if (mode == Mode::vectors)
        row->values->each(0, width,
                          [&](auto value) { logprob_.push_back(static_cast<float>(value)); });
      else if (row->num != 0) {
        add_ints(token_, *row->values, 0, row->num);
        add_candidates(row->candidates, 0, row->num);
      } else if (!is_packed)
        add_nothing(width);
      step.num_tokens += is_packed ? row->num : 1;
      step.num_saved += mode == Mode::tokens ? row->num : 0;
    }
    steps_.push_back(step);
  }

  // The rows of a refused message end with an error, unless they say that they have no token.
  void refuse(const Refused &refused, std::span<const Value> records) {
    Step step = begin_step(0, 0);
    step.bad = refused.why == Refusal::row     ? TP_BAD_ROWS
               : refused.why == Refusal::width ? TP_BAD_WIDTH
                                               : TP_BAD_MESSAGE;
    for (const Value &record : records)
      if (step.num_rows < sizes_.max_num_seqs)
        refuse_row(step, record);
    steps_.push_back(step);
  }

  void refuse_row(Step &step, const Value &record) {
    try {
      const Fields fields = fields_of(record);
      const uint32_t number = number_of(fields);
      Row row;
      row.state = refused_row;
      if (fields.has(output_type) && whole_of(fields, output_type) == TP_MESSAGE_DRAFT)
        return;
      try {
        take_tokens(fields, row);
      } catch (const Refused &) {
        row.state = refused_row; // it had tokens, and they cannot be read
      }
      if (row.state == TP_ROW_TOKEN)
        row.state = refused_row;
      add_row(step, number, row.state, 0, 0);
      add_nothing(0);
      step.num_saved += row.state == refused_row;
      step.num_tokens += 1;
    } catch (const Refused &) {
      return; // whose row it is cannot be told
    }
  }

  [[nodiscard]] Step begin_step(uint32_t flags, uint32_t width) const noexcept {
    Step step;
    step.flags = flags;
    step.width = width;
    step.row = row_.size();
    step.token = token_.size();
    step.id = id_.size();
    step.logprob = logprob_.size();
    step.rank = rank_.size();
    return step;
  }

  void add_row(Step &step, uint32_t number, uint8_t state, int32_t count, int32_t position) {
    row_.push_back(number);
    state_.push_back(state);
    accept_.push_back(count);
    position_.push_back(position);
    step.num_rows += 1;
  }

  void add_nothing(uint32_t width) {
    token_.push_back(0);
    if (width == 0)
      return;
    id_.insert(id_.end(), width, -1);
    logprob_.insert(logprob_.end(), width, 0.0f);
    rank_.push_back(0);
  }

  void add_candidates(const Candidates &found, uint64_t from, uint64_t count) {
    if (found.ids == nullptr)
      return;
    const uint64_t width = found.width();
    add_ints(id_, *found.ids, from * width, (from + count) * width);
    found.logprobs->each(from * width, (from + count) * width,
                         [&](auto value) { logprob_.push_back(static_cast<float>(value)); });
    add_ints(rank_, *found.ranks, from, from + count);
  }

  static void add_ints(std::vector<int32_t> &to, const Array &from, uint64_t first, uint64_t last) {
    from.each(first, last, [&](auto value) {
      if constexpr (std::is_integral_v<decltype(value)>) {
        if (!std::in_range<int32_t>(value))
          throw Refused(Refusal::record, "a token, candidate or rank is " + std::to_string(value) +
                                             ", which is outside int32");
        to.push_back(static_cast<int32_t>(value));
      }
    });
  }

  const tp_sizes sizes_;
  const uint32_t max_records_;
  pickle::Reader reader_;
  std::vector<Fields> fields_; // of each record
  std::vector<Row> rows_;
  std::vector<const Row *> run_;
  // Steps, and their columns one behind the other.
  std::vector<Step> steps_;
  size_t next_ = 0;
  std::vector<uint32_t> row_;
  std::vector<uint8_t> state_;
  std::vector<int32_t> position_, accept_, token_, id_, rank_;
  std::vector<float> logprob_;
};

} // namespace tp
