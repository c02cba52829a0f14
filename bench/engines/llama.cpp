// llama.cpp as a peer of `python -m bench engine`: PROGRAM GGUF DTYPE THREADS KV_TOKENS
//
// Answers the lines of JSON that bench/child.py writes. Drives the library itself, without its
// server's loop and samplers: this is as fast as llama.cpp can be asked. Everything is its default,
// but for the room for KV, which it is given as each question needs it.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "llama.h"

namespace {

using Tokens = std::vector<llama_token>;

// One step of several sequences.
class Batch {
public:
    explicit Batch(int size) : batch_(llama_batch_init(size, 0, 1)) {}
    ~Batch() { llama_batch_free(batch_); }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    void add(llama_token token, int position, int sequence, bool wants_logits) {
        const int at = batch_.n_tokens++;
        batch_.token[at] = token;
        batch_.pos[at] = position;
        batch_.n_seq_id[at] = 1;
        batch_.seq_id[at][0] = sequence;
        batch_.logits[at] = wants_logits;
    }

    void run(llama_context* context) {
        if (llama_decode(context, batch_) != 0) {
            throw std::runtime_error("llama_decode failed");
        }
        batch_.n_tokens = 0;
    }

private:
    llama_batch batch_;
};

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

class Engine {
public:
    Engine(const char* file, const std::string& dtype, int threads) : threads_(threads) {
        llama_backend_init();
        model_.reset(llama_model_load_from_file(file, llama_model_default_params()));
        if (!model_) {
            throw std::runtime_error(std::string("cannot load ") + file);
        }
        char text[128];
        llama_model_desc(model_.get(), text, sizeof text);
        const std::string description(text);
        const std::string wanted = dtype == "bfloat16" ? "BF16" : dtype == "float16" ? "F16" : "F32";
        if (description.find(" " + wanted) == std::string::npos &&
            description.find("all " + wanted) == std::string::npos) {
            throw std::runtime_error(description + " is not " + wanted);
        }
        vocab_size_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
    }

    // Seconds from a prompt to its first token.
    double prefill(const Tokens& prompt) {
        make_room(1, prompt.size() + 1);
        const double begin = seconds();
        compute(prompt, 0);
        return seconds() - begin;
    }

    // Computes prompts that `decode` continues by up to `count` tokens each.
    void hold(const std::vector<Tokens>& prompts, int count) {
        length_ = prompts.front().size();
        make_room(prompts.size(), length_ + 1 + count);
        first_tokens_.clear();
        for (const Tokens& prompt : prompts) {
            first_tokens_.push_back(compute(prompt, first_tokens_.size()));
        }
    }

    // Seconds from each held prompt's first token to the `count` after it, in one batch.
    double decode(int count) {
        Tokens tokens = first_tokens_;
        const int size = tokens.size();
        for (int sequence = 0; sequence < size; ++sequence) {
            llama_memory_seq_rm(llama_get_memory(context_.get()), sequence, length_, -1);
        }
        Batch batch(size);
        const double begin = seconds();
        for (int step = 0; step < count; ++step) {
            for (int sequence = 0; sequence < size; ++sequence) {
                batch.add(tokens[sequence], length_ + step, sequence, true);
            }
            batch.run(context_.get());
            for (int row = 0; row < size; ++row) {
                tokens[row] = best(row);
            }
        }
        return seconds() - begin;
    }

private:
    // An empty context for so many sequences of so many tokens.
    void make_room(int sequences, int length) {
        if (context_ && sequences == sequences_ && length <= room_) {
            llama_memory_clear(llama_get_memory(context_.get()), false);
            return;
        }
        sequences_ = sequences;
        room_ = length;
        llama_context_params params = llama_context_default_params();
        params.n_seq_max = sequences;
        params.n_ctx = sequences * length;
        params.n_threads = params.n_threads_batch = threads_;
        context_.reset(llama_init_from_model(model_.get(), params));
        if (!context_ || static_cast<int>(llama_n_ctx_seq(context_.get())) < length) {
            throw std::runtime_error("no room for KV");
        }
    }

    // Runs a prompt; returns the token behind it.
    llama_token compute(const Tokens& prompt, int sequence) {
        const int most = llama_n_batch(context_.get());
        const int length = prompt.size();
        Batch batch(most);
        int filled = 0;
        for (int at = 0; at < length; ++at) {
            batch.add(prompt[at], at, sequence, at + 1 == length);
            if (++filled == most || at + 1 == length) {
                batch.run(context_.get());
                filled = 0;
            }
        }
        return best(-1);
    }

    // The most probable token of a row; -1 is the last one with logits.
    llama_token best(int row) {
        const float* logits = llama_get_logits_ith(context_.get(), row);
        return std::max_element(logits, logits + vocab_size_) - logits;
    }

    struct Free {
        void operator()(llama_model* model) const { llama_model_free(model); }
        void operator()(llama_context* context) const { llama_free(context); }
    };

    int threads_;
    std::unique_ptr<llama_model, Free> model_;
    std::unique_ptr<llama_context, Free> context_;
    int vocab_size_ = 0;
    int sequences_ = 0;
    int room_ = 0;
    int length_ = 0;
    Tokens first_tokens_;
};

nlohmann::json answer(Engine& engine, const nlohmann::json& question) {
    const std::string what = question.at("what");
    if (what == "versions") {
        return {{"llama.cpp", llama_version()}};
    }
    if (what == "prefill") {
        return engine.prefill(question.at("prompt").get<Tokens>());
    }
    if (what == "hold") {
        engine.hold(question.at("prompts").get<std::vector<Tokens>>(), question.at("count"));
        return nullptr;
    }
    return engine.decode(question.at("count"));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::cerr << "PROGRAM GGUF DTYPE THREADS [KV_TOKENS]\n";
        return 2;
    }
    try {
        Engine engine(argv[1], argv[2], std::atoi(argv[3]));
        for (std::string line; std::getline(std::cin, line);) {
            std::cout << answer(engine, nlohmann::json::parse(line)) << std::endl;
        }
    } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
